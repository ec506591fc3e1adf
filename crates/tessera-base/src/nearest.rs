//! "Did you mean": the known name closest to an unknown one.

/// The candidate closest to `name`, if close enough to be a plausible slip.
#[must_use]
pub fn nearest<'a>(name: &str, candidates: impl IntoIterator<Item = &'a str>) -> Option<&'a str> {
    candidates
        .into_iter()
        .map(|c| (strsim::jaro_winkler(name, c), c))
        .filter(|(score, _)| *score > 0.75)
        .max_by(|a, b| a.0.total_cmp(&b.0))
        .map(|(_, c)| c)
}

/// A list of choices for a sentence: `a, b or c`.
#[must_use]
pub fn choices<T: ToString>(items: &[T]) -> String {
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
    fn finds_slips_and_leaves_strangers() {
        assert_eq!(nearest("widht", ["width", "height"]), Some("width"));
        assert_eq!(nearest("zzz", ["width", "height"]), None);
    }

    #[test]
    fn reads_as_a_sentence() {
        assert_eq!(choices(&[1, 2, 4]), "1, 2 or 4");
        assert_eq!(choices(&[7]), "7");
        assert_eq!(choices::<u8>(&[]), "none");
    }
}
