//! Decides whether a test may be skipped for lack of GPUs.

/// The variable with the number of GPUs that the tests must find on this machine.
pub const REQUIRE_GPUS: &str = "TESSERA_REQUIRE_GPUS";

/// Ends a test that would be skipped although the machine must have the GPUs that it needs.
///
/// `required` is the value of [`REQUIRE_GPUS`]; without it, every test may be skipped. `needed` is the
/// number of GPUs that the test needs, and `why` the reason why it cannot run. The caller reads the
/// variable, because a library reads no environment.
///
/// # Panics
/// Panics if at least `needed` GPUs are required, or if the value is not a number.
pub fn assert_may_skip(required: Option<&str>, needed: usize, why: &str) {
    let Some(value) = required else { return };
    let Ok(count) = value.parse::<usize>() else {
        panic!("{REQUIRE_GPUS} is `{value}`: set it to the number of GPUs of this machine");
    };
    assert!(needed > count, "{REQUIRE_GPUS} is {count}, but a test on {needed} GPU(s) did not run: {why}");
}

#[cfg(test)]
mod tests {
    use super::assert_may_skip;

    #[test]
    fn only_tests_that_need_more_gpus_may_be_skipped() {
        assert_may_skip(None, 1, "no GPU");
        assert_may_skip(Some("0"), 1, "no GPU");
        assert_may_skip(Some("1"), 2, "one GPU");
        for (required, needed) in [("1", 1), ("2", 1), ("2", 2), ("two", 4), ("", 1)] {
            let result = std::panic::catch_unwind(|| assert_may_skip(Some(required), needed, "no GPU"));
            assert!(result.is_err(), "{required} {needed}");
        }
    }
}
