//! The compact text of a list of ranks in a flight record, such as `0-24:8`.

use super::MAX_RANKS_BYTES;

/// Formats ascending ranks in their shortest form: `0-3`, `0-6:2` for every second one, `1,5,6`.
/// The result is empty if even that form is too long for a line.
#[must_use]
pub fn write_ranks(ranks: &[u32]) -> String {
    let mut parts = Vec::new();
    let mut at = 0;
    while at < ranks.len() {
        let stride = ranks.get(at + 1).map_or(0, |next| next - ranks[at]);
        let mut end = at;
        while stride > 0 && ranks.get(end + 1).is_some_and(|next| next - ranks[end] == stride) {
            end += 1;
        }
        match (end - at, stride) {
            (0, _) => parts.push(ranks[at].to_string()),
            // Two ranks that are not adjacent are no series yet.
            (1, s) if s > 1 => {
                end = at;
                parts.push(ranks[at].to_string());
            }
            (_, 1) => parts.push(format!("{}-{}", ranks[at], ranks[end])),
            (_, s) => parts.push(format!("{}-{}:{s}", ranks[at], ranks[end])),
        }
        at = end + 1;
    }
    Some(parts.join(",")).filter(|t| t.len() <= MAX_RANKS_BYTES).unwrap_or_default()
}

/// Parses the output of [`write_ranks`]; the result is empty for any other text and for ranks
/// beyond the maximum of a run.
#[must_use]
pub fn read_ranks(text: &str) -> Vec<u32> {
    const MAX_RANKS: u32 = 65_536;
    let part = |part: &str| -> Option<Vec<u32>> {
        let (range, stride) = match part.split_once(':') {
            Some((range, s)) => (range, s.parse().ok().filter(|s| *s > 0)?),
            None => (part, 1),
        };
        let (from, to): (u32, u32) = match range.split_once('-') {
            Some((a, b)) => (a.parse().ok()?, b.parse().ok()?),
            None => (range.parse().ok()?, range.parse().ok()?),
        };
        (to < MAX_RANKS && from <= to).then(|| (from..=to).step_by(stride).collect())
    };
    text.split(',').map(part).collect::<Option<Vec<_>>>().map(|p| p.concat()).unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rank_lists_round_trip() {
        for (ranks, text) in [
            (vec![], ""),
            (vec![3], "3"),
            (vec![0, 1, 2, 3], "0-3"),
            (vec![1, 3], "1,3"),
            (vec![0, 8, 16, 24], "0-24:8"),
            (vec![0, 1, 4, 5, 8], "0-1,4-5,8"),
        ] {
            assert_eq!(write_ranks(&ranks), text);
            assert_eq!(read_ranks(text), ranks);
        }
        let odd: Vec<u32> = (0..60).map(|i| i * i * 100).collect();
        assert_eq!(write_ranks(&odd), "");
        for bad in ["x", "3-1", "0-99999999", "1:0", "-", "0-4:0"] {
            assert_eq!(read_ranks(bad), Vec::<u32>::new(), "{bad}");
        }
    }
}
