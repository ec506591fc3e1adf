//! Reads variables of an environment, and keeps what was read and what is wrong with it.

use std::collections::BTreeMap;

use tessera_base::{Diagnostic, Diagnostics};

use crate::codes::T0034;

/// The variables of a process, and what was read of them so far.
pub(super) struct Variables<'a> {
    environment: &'a BTreeMap<String, String>,
    read: Vec<(String, String)>,
    problems: Diagnostics,
}

impl<'a> Variables<'a> {
    pub(super) fn new(environment: &'a BTreeMap<String, String>) -> Variables<'a> {
        Variables { environment, read: Vec::new(), problems: Vec::new() }
    }

    /// Returns the text of a variable; one of spaces counts as not set.
    pub(super) fn text(&mut self, name: &str) -> Option<String> {
        let text = self.environment.get(name)?.trim();
        if text.is_empty() {
            return None;
        }
        if self.read.iter().all(|(read, _)| read != name) {
            self.read.push((name.to_string(), text.to_string()));
        }
        Some(text.to_string())
    }

    /// Returns the text of the first of these variables that is set, and its name.
    pub(super) fn first_text<'n>(&mut self, names: &[&'n str]) -> Option<(&'n str, String)> {
        names.iter().find_map(|name| Some((*name, self.text(name)?)))
    }

    /// Returns a whole number; another text is a problem.
    pub(super) fn number(&mut self, name: &str, most: u32) -> Option<u32> {
        let text = self.text(name)?;
        let number = text.parse::<u32>().ok().filter(|n| *n <= most);
        if number.is_none() {
            self.reject(
                Diagnostic::error(&T0034, format!("{name} is not a whole number from 0 to {most}"))
                    .with_label(name, format!("`{text}`")),
            );
        }
        number
    }

    /// Returns the number of the first of these variables that is set.
    pub(super) fn first_number(&mut self, names: &[&str]) -> Option<u32> {
        let name = names.iter().find(|name| self.text(name).is_some())?;
        self.number(name, u32::MAX)
    }

    /// Returns numbers that a launcher always sets together. It is a problem if one is missing.
    pub(super) fn required<const N: usize>(&mut self, names: [&str; N]) -> Option<[u32; N]> {
        let (present, missing): (Vec<&str>, Vec<&str>) =
            names.iter().partition(|name| self.text(name).is_some());
        if !missing.is_empty() {
            self.reject(
                Diagnostic::error(
                    &T0034,
                    format!("{} is set and {} is not", present.join(" and "), missing.join(" and ")),
                )
                .with_hint(format!(
                    "set {} together, or none of them to start all ranks on this host",
                    names.join(" and ")
                )),
            );
            return None;
        }
        let numbers: Vec<u32> = names.iter().filter_map(|name| self.number(name, u32::MAX)).collect();
        numbers.try_into().ok()
    }

    pub(super) fn reject(&mut self, problem: Diagnostic) {
        self.problems.push(problem);
    }

    /// Returns the variables that were read, and all problems.
    pub(super) fn finish(self) -> (Vec<(String, String)>, Diagnostics) {
        (self.read, self.problems)
    }
}
