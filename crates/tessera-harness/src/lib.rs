//! Runs the tests of an executable that needs a `main` function of its own, because it starts itself again as a rank.
//!
//! Output and flags are those of Rust's own harness. Unlike in a `main` that calls one test after the other, the tests
//! behind one that fails run, too, and standard output names the test, with the place and the message of its panic.
#![forbid(unsafe_code)]
#![allow(clippy::disallowed_types, reason = "the panic hook and the test share a list")]

use std::panic::{PanicHookInfo, catch_unwind, set_hook, take_hook};
use std::process::ExitCode;
use std::sync::Mutex;
use std::thread::ThreadId;

use libtest_mimic::{Arguments, Failed, Trial};

/// Lists test functions with their paths as names, for [`run`].
#[macro_export]
macro_rules! tests {
    ($($first:ident $(::$further:ident)*)*) => {
        [$((concat!(stringify!($first) $(, "::", stringify!($further))*), $first$(::$further)* as fn())),*]
    };
}

/// Runs the tests that the arguments of the process select, in order, on the calling thread. No two run at once, because they start
/// processes and wait for them with time limits.
pub fn run(tests: &[(&'static str, fn())]) -> ExitCode {
    let arguments = Arguments { test_threads: Some(1), ..Arguments::from_args() };
    note_panics();
    let trials = tests.iter().map(|&(name, test)| Trial::test(name, move || run_test(test))).collect();
    libtest_mimic::run(&arguments, trials).exit_code()
}

/// Each panic that no test has reported yet, with the thread where it happened.
static PANICS: Mutex<Vec<(ThreadId, String)>> = Mutex::new(Vec::new());

/// Keeps the place and the message of every panic. The payload of a panic, which a harness gets, lacks the place.
fn note_panics() {
    let print = take_hook();
    set_hook(Box::new(move |info: &PanicHookInfo| {
        let text = info.to_string();
        if let Ok(mut panics) = PANICS.lock() {
            panics.push((std::thread::current().id(), text));
        }
        print(info);
    }));
}

/// Runs a test. The error has the place and the message of its panic, and those of the threads that panicked while it ran.
fn run_test(test: fn()) -> Result<(), Failed> {
    let outcome = catch_unwind(test);
    let panics = PANICS.lock().map(|mut p| std::mem::take(&mut *p)).unwrap_or_default();
    match outcome {
        Ok(()) => Ok(()),
        Err(_) => Err(describe_panics(&panics).into()),
    }
}

fn describe_panics(panics: &[(ThreadId, String)]) -> String {
    let this = std::thread::current().id();
    let lines = panics
        .iter()
        .map(|(thread, text)| if *thread == this { text.clone() } else { format!("another thread {text}") });
    lines.collect::<Vec<_>>().join("\n")
}

#[cfg(test)]
mod tests {
    use super::*;

    fn do_nothing() {}

    fn panic_after_a_thread() {
        let other = std::thread::spawn(|| panic!("first cause"));
        assert!(other.join().is_ok(), "a thread failed");
    }

    #[test]
    fn a_failure_states_the_place_and_the_message_of_each_panic() {
        note_panics();
        assert!(run_test(do_nothing).is_ok());
        let failed = run_test(panic_after_a_thread).unwrap_err();
        let text = failed.message().unwrap();
        for part in ["another thread panicked at", "first cause", "src/lib.rs:", "a thread failed"] {
            assert!(text.contains(part), "{text}");
        }
        assert!(run_test(do_nothing).is_ok());
    }

    #[test]
    fn tests_are_named_by_their_paths() {
        mod inner {
            pub(super) fn do_nothing() {}
        }
        let names = crate::tests![do_nothing inner::do_nothing].map(|(name, _)| name);
        assert_eq!(names, ["do_nothing", "inner::do_nothing"]);
    }
}
