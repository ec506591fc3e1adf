//! The report's section on the transports of groups: what the plan states, and what each group used.

use std::collections::BTreeMap;

use maud::{Markup, html};
use tessera_base::record_keys::TRANSPORT_KEY;

use super::layout::{render_note, render_section, render_table};
use crate::record::{RankStartup, RunRecord};

/// Most groups that are listed.
const MAX_GROUPS: usize = 200;

/// Renders a row for each group; nothing for a run whose ranks exchange no data.
pub(super) fn render_transports(record: &RunRecord) -> Markup {
    let startups = || record.events.iter().filter_map(|e| e.startup.as_ref());
    let groups = list_transports(startups());
    if groups.is_empty() {
        return Markup::default();
    }
    let omitted = groups.len().saturating_sub(MAX_GROUPS);
    let heads = html! { th.l { "group" } th.l { "used" } th.l { "stated by the plan" } };
    let rows = html! {
        @for (group, (used, stated)) in groups.iter().take(MAX_GROUPS) {
            tr { td.l { (group) } td.l { (used) } td.l { (stated) } }
        }
        @if omitted > 0 { tr { td colspan="3" { (omitted) " more" } } }
    };
    let note = "A plan with hosts states the path of each group: peer memory within a host, a switch domain or the network \
                between hosts, and hierarchical if only some members share a host.";
    render_section("Transports", &html! { (render_note(note)) (render_table(&heads, &rows)) })
}

/// Returns the transport in use and the stated path of each communicator, by its name. All members
/// report the same, or the run would have ended.
fn list_transports<'a>(
    startups: impl Iterator<Item = &'a RankStartup>,
) -> BTreeMap<&'a str, (&'a str, &'a str)> {
    let keys = startups.flat_map(|s| &s.keys);
    let transport = |(key, value): &'a (String, String)| {
        Some((key.strip_prefix(TRANSPORT_KEY)?.trim_start(), value.split_once(", ").unwrap_or((value, ""))))
    };
    keys.filter_map(transport).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::record::RunEvent;
    use crate::timeline::tests::sample;

    #[test]
    fn a_group_is_listed_once_with_what_it_used_and_what_was_stated() {
        let mut record = sample(1);
        assert!(render_transports(&record).0.is_empty());
        for rank in 0..2 {
            let key = format!("{TRANSPORT_KEY} group over tp of ranks 0, 1");
            let keys =
                vec![("threads".to_string(), "2".to_string()), (key, "TCP, stated peer memory".to_string())];
            let startup = RankStartup { rank, role: String::new(), keys, tripwires: Vec::new() };
            record.events.push(RunEvent {
                at_ns: 0,
                event: "startup".to_string(),
                detail: String::new(),
                startup: Some(startup),
                memory: None,
            });
        }
        let text = render_transports(&record).0;
        assert_eq!(text.matches("group over tp of ranks 0, 1").count(), 1, "{text}");
        assert!(text.contains("<td class=\"l\">TCP</td><td class=\"l\">stated peer memory</td>"), "{text}");
    }
}
