//! Tests a fragment: ops without a program around them.

use tessera_ir::{is_fragment, parse_fragment, print_fragment};

use crate::{EXPECT_HEADING, compare_diagnostics};

/// Checks that the fragment's review gives the marked diagnostics, and returns the printed fragment
/// if the file expects one.
pub(crate) fn run_fragment_test(text: &str, name: &str) -> Result<Option<String>, Vec<String>> {
    let parsed = parse_fragment(text, name);
    let found = match &parsed {
        Ok(f) => f.review(name),
        Err(ds) => ds.clone(),
    };
    let mut wrong = compare_diagnostics(text, &found);
    if !is_fragment(text) {
        wrong.push("the text is recognised as a program".to_string());
    }
    let Ok(f) = parsed else {
        return if wrong.is_empty() { Ok(None) } else { Err(wrong) };
    };
    let printed = print_fragment(&f);
    match parse_fragment(&printed, "printed") {
        Err(ds) => wrong.push(format!("the printed fragment is rejected: {}", ds[0].message)),
        Ok(again) => {
            if print_fragment(&again) != printed {
                wrong.push("the printed text changes after parsing and printing again".to_string());
            }
            if again.without_spans() != f.without_spans() {
                wrong.push("the fragment changes after printing and parsing".to_string());
            }
        }
    }
    match wrong.is_empty() {
        true => Ok(text.contains(EXPECT_HEADING).then_some(printed)),
        false => Err(wrong),
    }
}
