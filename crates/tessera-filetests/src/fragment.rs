//! Reads and reviews a fragment: ops without a program around them.

use tessera_ir::{is_fragment, parse_fragment, print_fragment};

use crate::{EXPECT, compare_diagnostics};

/// The printed fragment where the file expects one, once its review is what the file marks.
pub(crate) fn fragment(text: &str, name: &str) -> Result<Option<String>, Vec<String>> {
    let parsed = parse_fragment(text, name);
    let found = match &parsed {
        Ok(f) => f.review(name),
        Err(ds) => ds.clone(),
    };
    let mut wrong = compare_diagnostics(text, &found);
    if !is_fragment(text) {
        wrong.push("this text is taken for a program".to_string());
    }
    let Ok(f) = parsed else {
        return if wrong.is_empty() { Ok(None) } else { Err(wrong) };
    };
    let printed = print_fragment(&f);
    match parse_fragment(&printed, "printed") {
        Err(ds) => wrong.push(format!("what it prints is refused: {}", ds[0].message)),
        Ok(again) => {
            if print_fragment(&again) != printed {
                wrong.push("it prints differently after reading back".to_string());
            }
            if again.without_spans() != f.without_spans() {
                wrong.push("it is another fragment after reading back".to_string());
            }
        }
    }
    match wrong.is_empty() {
        true => Ok(text.contains(EXPECT).then_some(printed)),
        false => Err(wrong),
    }
}
