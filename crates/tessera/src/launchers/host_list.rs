//! Lists of hosts and of task counts as Slurm writes them: `node[01-03,7]` and `4(x2),3`.

/// Maximum number of hosts in a list.
pub const MAX_HOSTS: usize = 1024;

/// Returns the hosts of a list such as `head,node[01-03,7],r[1-2]n[1-4]`, in its order. The last
/// brackets of a name count fastest, and a number keeps the zeros in front of it.
///
/// # Errors
/// Says in one clause what is wrong with the list.
pub fn expand_hosts(text: &str) -> Result<Vec<String>, String> {
    let mut hosts = Vec::new();
    for item in split_outside_brackets(text)? {
        hosts.extend(expand_item(item.trim())?);
        check_count(hosts.len())?;
    }
    Ok(hosts)
}

/// Returns the counts of a list such as `4(x2),3`.
///
/// # Errors
/// Says in one clause what is wrong with the list.
pub fn expand_task_counts(text: &str) -> Result<Vec<u32>, String> {
    let mut counts = Vec::new();
    for item in text.split(',').map(str::trim) {
        let (count, repeats) = match item.split_once("(x") {
            Some((count, rest)) => (count, rest.strip_suffix(')').unwrap_or("")),
            None => (item, "1"),
        };
        let (Ok(count), Ok(repeats)) = (count.parse::<u32>(), repeats.parse::<usize>()) else {
            return Err(format!("`{item}` is neither a count nor a count with (xN)"));
        };
        check_count(counts.len().saturating_add(repeats))?;
        counts.extend(std::iter::repeat_n(count, repeats));
    }
    Ok(counts)
}

fn check_count(hosts: usize) -> Result<(), String> {
    if hosts > MAX_HOSTS { Err(format!("more than {MAX_HOSTS} hosts")) } else { Ok(()) }
}

/// Splits a list at the commas outside of brackets.
///
/// # Errors
/// Says in one clause what is wrong with the brackets.
pub fn split_outside_brackets(text: &str) -> Result<Vec<&str>, String> {
    let (mut items, mut from, mut is_inside) = (Vec::new(), 0, false);
    for (at, c) in text.char_indices() {
        match (c, is_inside) {
            ('[', false) => is_inside = true,
            (']', true) => is_inside = false,
            ('[' | ']', _) => return Err("the brackets do not match".to_string()),
            (',', false) => {
                items.push(&text[from..at]);
                from = at + 1;
            }
            _ => {}
        }
    }
    if is_inside {
        return Err("a bracket is not closed".to_string());
    }
    items.push(&text[from..]);
    Ok(items)
}

fn expand_item(item: &str) -> Result<Vec<String>, String> {
    if item.is_empty() || item.contains(char::is_whitespace) {
        return Err(format!("`{item}` is no host name"));
    }
    let Some((prefix, rest)) = item.split_once('[') else { return Ok(vec![item.to_string()]) };
    let (ranges, rest) = rest.split_once(']').ok_or("a bracket is not closed")?;
    let ends = if rest.is_empty() { vec![String::new()] } else { expand_item(rest)? };
    let mut hosts = Vec::new();
    for range in ranges.split(',') {
        for number in expand_range(range)? {
            hosts.extend(ends.iter().map(|end| format!("{prefix}{number}{end}")));
            check_count(hosts.len())?;
        }
    }
    Ok(hosts)
}

fn expand_range(range: &str) -> Result<Vec<String>, String> {
    let (first, last) = range.split_once('-').unwrap_or((range, range));
    let is_number = |text: &str| !text.is_empty() && text.bytes().all(|b| b.is_ascii_digit());
    let bounds = (first.parse::<u64>(), last.parse::<u64>());
    let (Ok(low), Ok(high), true) = (bounds.0, bounds.1, is_number(first) && is_number(last)) else {
        return Err(format!("`{range}` is no range of numbers"));
    };
    if low > high {
        return Err(format!("the range `{range}` counts down"));
    }
    if high - low >= MAX_HOSTS as u64 {
        return Err(format!("more than {MAX_HOSTS} hosts"));
    }
    let width = if first.starts_with('0') { first.len() } else { 0 };
    Ok((low..=high).map(|number| format!("{number:0width$}")).collect())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn hosts(text: &str) -> Vec<String> {
        expand_hosts(text).unwrap()
    }

    #[test]
    fn ranges_keep_their_zeros_and_their_order() {
        assert_eq!(hosts("node[01-03,7]"), ["node01", "node02", "node03", "node7"]);
        assert_eq!(hosts("b,a[098-101]-ib"), ["b", "a098-ib", "a099-ib", "a100-ib", "a101-ib"]);
        assert_eq!(hosts("r[1-2]n[3,05]"), ["r1n3", "r1n05", "r2n3", "r2n05"]);
        assert_eq!(hosts("10.0.0.1"), ["10.0.0.1"]);
    }

    #[test]
    fn a_broken_list_says_what_is_wrong() {
        let bad = [
            ("", "no host name"),
            ("a,,b", "no host name"),
            ("a[1-2", "not closed"),
            ("a]1[", "do not match"),
            ("a[[1]]", "do not match"),
            ("a[3-1]", "counts down"),
            ("a[x]", "no range"),
            ("a[-1]", "no range"),
            ("a[]", "no range"),
            ("a[0-99999999999]", "more than 1024"),
            ("a[1-900],b[1-900]", "more than 1024"),
            ("a[1-40]b[1-40]", "more than 1024"),
        ];
        for (text, why) in bad {
            let said = expand_hosts(text).unwrap_err();
            assert!(said.contains(why), "{text}: {said}");
        }
    }

    #[test]
    fn counts_repeat() {
        assert_eq!(expand_task_counts("4(x2),3").unwrap(), [4, 4, 3]);
        assert_eq!(expand_task_counts("1").unwrap(), [1]);
        for bad in ["", "4(x", "4(2)", "x2", "4(x-1)", "1(x99999999)"] {
            assert!(expand_task_counts(bad).is_err(), "{bad}");
        }
    }
}
