//! The catalog: machines that people ask for by name. Each is a file with a source beside every figure.

use tessera_base::{Code, Diagnostic, nearest};

use crate::Cluster;

/// No cluster of that name.
pub static T1104: Code = Code {
    id: "T1104",
    title: "unknown cluster",
    page: "A cluster is named from the catalog or is a TOML file. `tessera measure` writes such a file for the machine \
at hand; to describe a machine that you do not have, print the nearest catalog entry, edit its figures and give the \
file's path instead of a name. Several racks of one cluster need no entry of their own: say how many.",
};

/// Name and file of every entry, in the order in which they are listed to people.
const ENTRIES: &[(&str, &str)] = &[
    ("gb200-nvl72", include_str!("../clusters/gb200-nvl72.toml")),
    ("gb300-nvl72", include_str!("../clusters/gb300-nvl72.toml")),
    ("hgx-b200", include_str!("../clusters/hgx-b200.toml")),
    ("hgx-h200", include_str!("../clusters/hgx-h200.toml")),
    ("hgx-h100", include_str!("../clusters/hgx-h100.toml")),
    ("hgx-a100", include_str!("../clusters/hgx-a100.toml")),
    ("laptop", include_str!("../clusters/laptop.toml")),
];

/// Names of the catalog.
pub fn names() -> impl Iterator<Item = &'static str> {
    ENTRIES.iter().map(|(name, _)| *name)
}

/// An entry of the catalog, one rack of it.
#[must_use]
pub fn named(name: &str) -> Option<Cluster> {
    let (name, text) = ENTRIES.iter().find(|(n, _)| *n == name)?;
    // A test reads every entry, so none of them fails here.
    Cluster::parse(name, text).ok()
}

/// An entry of the catalog, or a refusal that lists the names.
///
/// # Errors
/// T1104.
pub fn find(name: &str) -> Result<Cluster, Box<Diagnostic>> {
    named(name).ok_or_else(|| {
        let mut d = Diagnostic::error(&T1104, format!("no cluster is called `{name}`"))
            .hint(format!("clusters: {}", names().collect::<Vec<_>>().join(", ")));
        if let Some(n) = nearest(name, names()) {
            d = d.note(format!("closest: `{n}`"));
        }
        Box::new(d)
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{LinkClass, Precision, Tier};

    #[test]
    fn every_entry_reads_prints_and_reads_again() {
        for (name, text) in ENTRIES {
            let c = Cluster::parse(name, text).unwrap_or_else(|d| panic!("{name}: {d:?}"));
            assert_eq!(c.name, *name);
            let printed = c.text();
            let again = Cluster::parse(name, &printed).unwrap();
            assert_eq!(c, again, "{name}");
            assert_eq!(printed, again.text(), "{name}");
        }
    }

    #[test]
    fn a_rack_is_one_domain_with_its_cpus() {
        let c = named("gb200-nvl72").unwrap();
        assert_eq!((c.devices(), c.domain, c.domains()), (72, 72, 1));
        assert_eq!(c.devices() / c.devices_per_socket, 36);
        // Two devices that read at once share one Grace: 200 GB/s each, below both of its limits.
        assert_eq!(c.tier_bytes_per_s(Tier::Host), 200e9);
        assert!(c.tier_bytes_per_s(Tier::Peer) > c.tier_bytes_per_s(Tier::Host));
        assert_eq!(c.clone().with_racks(128).devices(), 9216);
        assert_eq!(c.with_racks(128).domains(), 128);
    }

    #[test]
    fn devices_without_units_for_a_format_have_no_peak() {
        assert_eq!(named("hgx-a100").unwrap().flops_per_s(Precision::Fp8), None);
        assert_eq!(named("hgx-h200").unwrap().flops_per_s(Precision::Fp4), None);
        assert_eq!(named("gb300-nvl72").unwrap().flops_per_s(Precision::Fp4), Some(15e15));
        assert!(names().all(|n| LinkClass::ALL.iter().all(|l| !named(n).unwrap().link(*l).multicast)));
    }

    #[test]
    fn contradictions_are_refused_together_and_unknown_keys_by_name() {
        let text = ENTRIES[3].1;
        let changed = |from: &str, to: &str| {
            assert!(text.contains(from), "{from}");
            let ds = Cluster::parse("c.toml", &text.replacen(from, to, 1)).unwrap_err();
            ds.iter().map(|d| (d.code.id, d.message.clone())).collect::<Vec<_>>()
        };
        let one = changed("domain = 8", "domain = 3");
        assert_eq!(one[0].0, "T1101");
        assert_eq!(changed("devices_per_host = 8", "devices_per_host = 90000")[0].0, "T1101");
        assert_eq!(changed("value = 4.8e12", "value = -1.0")[0].0, "T1102");
        assert_eq!(changed("value = 50e9", "value = 500e9")[0].0, "T1103");
        assert_eq!(changed("value = 1.978e15", "value = 1e12")[0].0, "T1103");
        let unknown = changed("measured =", "mesured =");
        assert_eq!(unknown[0].0, "T0002");
        let both = text.replacen("domain = 8", "domain = 3", 1).replacen("value = 4.8e12", "value = 0", 1);
        let ids: Vec<_> = Cluster::parse("c", &both).unwrap_err().iter().map(|d| d.code.id).collect();
        assert_eq!(ids, ["T1101", "T1102"]);
    }

    #[test]
    fn a_name_nearly_right_is_recognised() {
        let d = find("gb200-nvl27").unwrap_err();
        assert_eq!(d.notes, ["closest: `gb200-nvl72`"]);
    }
}
