//! Suggestions for misspelt names ("did you mean …?") and formatted lists of choices.

/// Returns the candidate closest to `name`, if its Jaro–Winkler similarity exceeds 0.75.
#[must_use]
pub fn closest_name<'a>(name: &str, candidates: impl IntoIterator<Item = &'a str>) -> Option<&'a str> {
    candidates
        .into_iter()
        .map(|c| (strsim::jaro_winkler(name, c), c))
        .filter(|(score, _)| *score > 0.75)
        .max_by(|a, b| a.0.total_cmp(&b.0))
        .map(|(_, c)| c)
}

/// Formats a list of choices for use in a sentence: `a, b or c`.
#[must_use]
pub fn format_choices<T: ToString>(items: &[T]) -> String {
    let items: Vec<String> = items.iter().map(T::to_string).collect();
    match items.split_last() {
        None => "none".to_string(),
        Some((last, [])) => last.clone(),
        Some((last, rest)) => format!("{} or {last}", rest.join(", ")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn suggests_only_similar_names() {
        assert_eq!(closest_name("widht", ["width", "height"]), Some("width"));
        assert_eq!(closest_name("zzz", ["width", "height"]), None);
    }

    #[test]
    fn reads_as_a_sentence() {
        assert_eq!(format_choices(&[1, 2, 4]), "1, 2 or 4");
        assert_eq!(format_choices(&[7]), "7");
        assert_eq!(format_choices::<u8>(&[]), "none");
    }
}
