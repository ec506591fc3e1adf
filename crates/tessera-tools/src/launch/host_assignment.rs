//! Hosts with their numbers of ranks: read from a list or a file, and filled in the order of ranks.

use std::collections::BTreeSet;

use tessera::Mesh;
use tessera::launchers::{expand_hosts, share_of_host, split_outside_brackets};
use tessera_base::Diagnostic;

use crate::codes::{T0065, T0066};

/// Most hosts that a number or a list may state: more than a plan has ranks.
const MAX_HOST_COUNT: u32 = 65_536;

/// A host, and how many ranks it takes if that was stated.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct HostSlots {
    /// Name or address of the host.
    pub name: String,
    /// Number of ranks.
    pub slots: Option<u32>,
}

/// A host and its ranks, whose numbers are consecutive.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct HostRanks {
    /// Name or address of the host.
    pub name: String,
    /// First rank.
    pub first: u32,
    /// Number of ranks.
    pub count: u32,
}

/// Parses a list of hosts such as `node[01-03]:4,spare:4`.
///
/// # Errors
/// T0065.
pub fn parse_host_list(text: &str) -> Result<Vec<HostSlots>, Diagnostic> {
    let mut hosts = Vec::new();
    for item in split_outside_brackets(text).map_err(|why| unreadable("--hosts", text, &why))? {
        let item = item.trim();
        hosts.extend(parse_item(item).map_err(|why| unreadable("--hosts", item, &why))?);
    }
    check_hosts(hosts)
}

/// Parses a number of hosts such as `2`, or a list of hosts.
///
/// # Errors
/// T0065.
pub fn parse_host_count_or_list(text: &str) -> Result<Vec<HostSlots>, Diagnostic> {
    let count = text.trim();
    if count.is_empty() || !count.bytes().all(|b| b.is_ascii_digit()) {
        return parse_host_list(text);
    }
    // A number with too many digits is a number too, and no name of a host.
    match count.parse::<u32>() {
        Ok(count) if (1..=MAX_HOST_COUNT).contains(&count) => {
            Ok((0..count).map(|number| HostSlots { name: format!("host {number}"), slots: None }).collect())
        }
        _ => Err(Diagnostic::error(
            &T0065,
            format!("`{count}` is no number of hosts: there may be 1 to {MAX_HOST_COUNT}"),
        )
        .with_label("--hosts", format!("`{count}`"))
        .with_hint("give the number of hosts, or the ranks of each, as in a:4,b:4")),
    }
}

/// Parses a file with one host per line, as Open MPI (`node01 slots=4`) and MPICH (`node01:4`) read
/// it.
///
/// # Errors
/// T0065 with the number of the line.
pub fn parse_host_file(file: &str, text: &str) -> Result<Vec<HostSlots>, Diagnostic> {
    let mut hosts = Vec::new();
    for (line, number) in text.lines().zip(1u32..) {
        let line = line.split('#').next().unwrap_or("").trim();
        if line.is_empty() {
            continue;
        }
        let mut words = line.split_whitespace();
        let mut item = words.next().unwrap_or("").to_string();
        let wrong = |why: &str| unreadable(&format!("{file}:{number}"), line, why);
        for word in words {
            match word.split_once('=') {
                Some(("slots", count)) if !item.contains(':') => item = format!("{item}:{count}"),
                Some(("max_slots" | "max-slots", _)) => {}
                _ => return Err(wrong("only slots=N may follow the name")),
            }
        }
        hosts.extend(parse_item(&item).map_err(|why| wrong(&why))?);
    }
    check_hosts(hosts)
}

/// Gives the ranks of a plan to the hosts, in order.
///
/// # Errors
/// T0066 if the numbers do not add up.
pub fn assign_ranks(hosts: &[HostSlots], mesh: &Mesh) -> Result<Vec<HostRanks>, Diagnostic> {
    let world = mesh.world_size();
    let stated: Vec<u32> = hosts.iter().filter_map(|h| h.slots).collect();
    let misfit =
        |what: String| Diagnostic::error(&T0066, what).with_label("plan", format!("{mesh}, {world} ranks"));
    let count = hosts.len() as u32;
    let counts: Vec<u32> = if hosts.is_empty() {
        return Err(misfit("no host is named".to_string()));
    } else if stated.is_empty() {
        let counts = (0..count).map(|host| Some(share_of_host(mesh, host, count)?.count));
        counts.collect::<Option<Vec<u32>>>().ok_or_else(|| {
            let inside = world - mesh.outside_count();
            misfit(format!("{inside} ranks of the mesh cannot be divided among {count} hosts"))
                .with_hint("state the ranks of each host, as in --hosts a:4,b:3")
        })?
    } else if stated.len() < hosts.len() {
        let without = hosts.iter().find(|h| h.slots.is_none()).map_or("", |h| h.name.as_str());
        return Err(misfit(format!("some hosts state their ranks and {without} does not"))
            .with_hint("state the ranks of every host, or of none"));
    } else {
        stated
    };
    let sum: u64 = counts.iter().map(|n| u64::from(*n)).sum();
    if sum != u64::from(world) {
        return Err(misfit(format!("the hosts take {sum} ranks and the plan has {world}"))
            .with_label("hosts", format!("{count} hosts, {sum} ranks")));
    }
    let mut first = 0;
    Ok(hosts
        .iter()
        .zip(counts)
        .map(|(host, count)| {
            let ranks = HostRanks { name: host.name.clone(), first, count };
            first += count;
            ranks
        })
        .collect())
}

fn parse_item(item: &str) -> Result<Vec<HostSlots>, String> {
    // The colons of an IPv6 address stand in no list of hosts: its brackets would be ranges.
    let (names, slots) = match item.rsplit_once(':') {
        None => (item, None),
        Some((names, count)) => {
            let count = count.parse::<u32>().ok().filter(|n| *n > 0);
            (names, Some(count.ok_or("what follows the colon is no number of ranks")?))
        }
    };
    let names = expand_hosts(names)?;
    Ok(names.into_iter().map(|name| HostSlots { name, slots }).collect())
}

fn check_hosts(hosts: Vec<HostSlots>) -> Result<Vec<HostSlots>, Diagnostic> {
    if hosts.len() > MAX_HOST_COUNT as usize {
        let why = format!("there may be at most {MAX_HOST_COUNT} hosts");
        return Err(unreadable("hosts", &format!("{} hosts", hosts.len()), &why));
    }
    let mut seen = BTreeSet::new();
    match hosts.iter().find(|h| !seen.insert(h.name.as_str())) {
        Some(twice) => Err(unreadable("hosts", &twice.name, "the host is named twice")),
        None => Ok(hosts),
    }
}

fn unreadable(place: &str, text: &str, why: &str) -> Diagnostic {
    Diagnostic::error(&T0065, format!("`{text}` does not name hosts: {why}"))
        .with_label(place, format!("`{text}`"))
        .with_hint("write them like node[01-03]:4,spare:4")
}

#[cfg(test)]
mod tests {
    use super::*;

    fn slots(hosts: &[HostSlots]) -> Vec<(&str, Option<u32>)> {
        hosts.iter().map(|h| (h.name.as_str(), h.slots)).collect()
    }

    #[test]
    fn lists_and_files_name_the_same_hosts() {
        let list = parse_host_list("n[1-2,4]:4, spare:1").unwrap();
        assert_eq!(slots(&list), [("n1", Some(4)), ("n2", Some(4)), ("n4", Some(4)), ("spare", Some(1))]);
        let file =
            "# rack 3\nn1 slots=4 max_slots=4\nn2:4  # as MPICH writes it\n\nn4 slots=4\nspare slots=1\n";
        assert_eq!(parse_host_file("hosts", file).unwrap(), list);
        assert_eq!(slots(&parse_host_list("a,b").unwrap()), [("a", None), ("b", None)]);
        assert_eq!(parse_host_count_or_list("a:2,b:1").unwrap(), parse_host_list("a:2,b:1").unwrap());
        assert_eq!(parse_host_count_or_list(" 3").unwrap().len(), 3);
        for wrong in ["0", "65537", "-1:x", ""] {
            assert_eq!(parse_host_count_or_list(wrong).unwrap_err().code, &T0065, "{wrong}");
        }
    }

    #[test]
    fn a_number_of_hosts_above_the_limit_is_no_name_of_a_host() {
        assert_eq!(parse_host_count_or_list("65536").unwrap().len(), 65_536);
        for wrong in ["65537", "99999999999", "340282366920938463463374607431768211456"] {
            let d = parse_host_count_or_list(wrong).unwrap_err();
            assert!(d.code == &T0065 && d.message.contains("1 to 65536"), "{d:?}");
        }
        let lines: String = (0..65_537).map(|n| format!("n{n}\n")).collect();
        let d = parse_host_file("hosts", &lines).unwrap_err();
        assert!(d.message.contains("at most 65536 hosts"), "{d:?}");
    }

    #[test]
    fn a_wrong_list_names_the_item_and_the_line() {
        for (text, why) in
            [("a:0", "no number"), ("a:x", "no number"), ("a,a", "twice"), ("a,,b", "no host name")]
        {
            let d = parse_host_list(text).unwrap_err();
            assert!(d.code == &T0065 && d.message.contains(why), "{text}: {d:?}");
        }
        let d = parse_host_file("hosts", "a\nb cores=4\n").unwrap_err();
        assert_eq!(d.labels[0].location, "hosts:2");
    }

    #[test]
    fn ranks_fill_hosts_in_order() {
        let mesh: Mesh = "tp=4,outside=1".parse().unwrap();
        let assign = |text: &str| assign_ranks(&parse_host_list(text).unwrap(), &mesh);
        let ranks = |hosts: Vec<HostRanks>| hosts.iter().map(|h| (h.first, h.count)).collect::<Vec<_>>();
        assert_eq!(ranks(assign("a,b").unwrap()), [(0, 3), (3, 2)]);
        assert_eq!(ranks(assign("a:1,b:4").unwrap()), [(0, 1), (1, 4)]);
        for (hosts, why) in [
            ("a,b,c", "cannot be divided among 3"),
            ("a:2,b", "b does not"),
            ("a:4,b:4", "take 8 ranks and the plan has 5"),
        ] {
            let d = assign(hosts).unwrap_err();
            assert!(d.code == &T0066 && d.message.contains(why), "{hosts}: {d:?}");
        }
    }
}
