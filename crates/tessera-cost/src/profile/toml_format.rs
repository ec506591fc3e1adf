//! The TOML format of a profile: reader and writer.

use std::collections::BTreeMap;
use std::fmt::Write;
use std::ops::RangeInclusive;

use tessera_base::config::{ConfigReader, parse_toml, quote_toml};
use tessera_base::{Diagnostic, Diagnostics, format_choices};
use tessera_mesh::Precision;

use super::{
    AlgorithmLines, AttentionCurve, CollectiveLibrary, CostLine, Curves, GemmCurve, GroupedGemmCurve,
    HostCosts, JOBS, MemoryCurve, OverlapTraits, Profile, TpOverlap,
};
use crate::codes::T1106;
use crate::executor_traits::ExecutorTraits;

impl Profile {
    /// Parses a profile; diagnostics refer to the text as `file`.
    ///
    /// # Errors
    /// T0001 to T0004 for a text that cannot be parsed, T1106 for a curve out of range.
    pub fn parse(file: &str, text: &str) -> Result<Profile, Diagnostics> {
        let mut top = ConfigReader::new(file, "", parse_toml(file, text)?);
        let mut reader = ProfileReader { file, found: Vec::new() };
        let name = top.read_text("name", None);
        let title = top.read_text("title", None);
        let error = reader.read_ranged(&mut top, "error", None, 0.0..=10.0);
        let validated = reader.read_jobs(&mut top);
        let mut table = top.read_table("executor");
        let executor = ExecutorTraits::from_config(&mut table);
        reader.found.extend(table.finish());
        let base = reader.read_curves(&mut top, None);
        let families: BTreeMap<String, Curves> = top
            .read_tables("families")
            .into_iter()
            .map(|(family, mut fields)| {
                let curves = reader.read_curves(&mut fields, Some(&base));
                reader.found.extend(fields.finish());
                (family, curves)
            })
            .collect();
        reader.found.extend(top.finish());
        if reader.found.is_empty() {
            Ok(Profile {
                name,
                title,
                error_share: error,
                validated_jobs: validated,
                executor,
                base,
                families,
            })
        } else {
            Err(reader.found)
        }
    }

    /// Writes the profile as TOML, which [`Profile::parse`] reads back to an equal profile.
    #[must_use]
    pub fn to_toml(&self) -> String {
        let mut out = format!(
            "name = {}\ntitle = {}\nerror = {:?}\nvalidated = [{}]\n",
            quote_toml(&self.name),
            quote_toml(&self.title),
            self.error_share,
            self.validated_jobs.iter().map(|v| quote_toml(v)).collect::<Vec<_>>().join(", ")
        );
        let _ = write!(out, "\n[executor]\n{}", self.executor.to_toml());
        write_curves(&mut out, "", &self.base, None);
        for (family, curves) in &self.families {
            let path = format!("families.{family}.");
            let before = out.len();
            write_curves(&mut out, &path, curves, Some(&self.base));
            if out.len() == before {
                let _ = write!(out, "\n[families.{family}]\n");
            }
        }
        out
    }
}

/// Range of a share of a peak or a bandwidth.
const SHARE: RangeInclusive<f64> = 1e-6..=1.0;
/// Range of a size or a time.
const NON_NEGATIVE: RangeInclusive<f64> = 0.0..=1e15;

/// A table of a profile.
trait ProfileTable: Clone + PartialEq {
    /// Reads the keys of the table. A key that it lacks has the value of `base`.
    fn read(reader: &mut ProfileReader<'_>, fields: &mut ConfigReader<'_>, base: Option<&Self>) -> Self;

    /// Writes the table `path`, and the tables inside it.
    fn write(&self, path: &str, out: &mut String);
}

/// Lists the keys of the tables: `[a choice: its type]`, `(flags, which are off by default)`, and
/// numbers with their ranges and perhaps a default. Every table also has a source. A flag with
/// `if true` is written only if it is set.
macro_rules! profile_tables {
    ($($table:ident $([$choice:ident: $choices:ident])? $(($($flag:ident $(if $written:literal)?),+))? {
        $($key:ident in $range:expr $(, else $default:literal)?;)*
    })+) => {
        $(impl ProfileTable for $table {
            fn read(
                reader: &mut ProfileReader<'_>,
                fields: &mut ConfigReader<'_>,
                base: Option<&$table>,
            ) -> $table {
                $table {
                    $($key: {
                        let default = base.map(|b| b.$key)$(.or(Some($default)))?;
                        reader.read_ranged(fields, stringify!($key), default, $range)
                    },)*
                    $($choice: {
                        let default = base.map_or($choices::ALL[0], |b| b.$choice);
                        fields.read_named(stringify!($choice), &$choices::ALL, $choices::name, default)
                    },)?
                    $($($flag: fields.read_flag(stringify!($flag), base.is_some_and(|b| b.$flag)),)+)?
                    source: fields.read_text("source", None),
                }
            }

            fn write(&self, path: &str, out: &mut String) {
                let _ = write!(out, "\n[{path}]\n");
                $(let _ = writeln!(out, "{} = {:?}", stringify!($key), self.$key);)*
                $(let _ = writeln!(out, "{} = \"{}\"", stringify!($choice), self.$choice.name());)?
                $($(if [$($written)?].iter().all(|written: &bool| *written == self.$flag) {
                    let _ = writeln!(out, "{} = {}", stringify!($flag), self.$flag);
                })+)?
                let _ = writeln!(out, "source = {}", quote_toml(&self.source));
            }
        })+
    };
}

profile_tables! {
    GemmCurve {
        max_efficiency in SHARE;
        share in 1e-6..=2.0;
        m_half in NON_NEGATIVE;
        n_half in NON_NEGATIVE;
        k_half in NON_NEGATIVE;
        start_ns in NON_NEGATIVE;
    }
    AttentionCurve (stores_scores if true) {
        share in SHARE;
        queries_half in NON_NEGATIVE;
        keys_half in NON_NEGATIVE;
        memory_share in SHARE;
        start_ns in NON_NEGATIVE;
    }
    GroupedGemmCurve {
        share in SHARE;
        rows_half in NON_NEGATIVE;
        memory_share in SHARE, else 1.0;
        start_ns in NON_NEGATIVE;
    }
    MemoryCurve {
        share in SHARE;
        start_ns in NON_NEGATIVE;
        reserved_bytes in NON_NEGATIVE;
        cached_bytes in NON_NEGATIVE, else 0.0;
        cached_speedup in 1.0..=1000.0, else 1.0;
    }
    HostCosts (captured) {
        launch_ns in NON_NEGATIVE;
        contention in 1.0..=100.0;
    }
    OverlapTraits [tp: TpOverlap] (fuses_weight_gradient, overlaps_gathers, overlaps_dispatch) {
        chunk_rows in NON_NEGATIVE;
    }
}

impl ProfileTable for CollectiveLibrary {
    fn read(
        reader: &mut ProfileReader<'_>,
        fields: &mut ConfigReader<'_>,
        base: Option<&CollectiveLibrary>,
    ) -> CollectiveLibrary {
        let mut lines =
            |key, of: fn(&CollectiveLibrary) -> &AlgorithmLines| reader.read_table(fields, key, base.map(of));
        CollectiveLibrary {
            all_reduce: lines("all_reduce", |l| &l.all_reduce),
            gather: lines("gather", |l| &l.gather),
            all_to_all: lines("all_to_all", |l| &l.all_to_all),
            broadcast: lines("broadcast", |l| &l.broadcast),
            send: lines("send", |l| &l.send),
            eager_ns: reader.read_ranged(fields, "eager_ns", base.map(|b| b.eager_ns), NON_NEGATIVE),
            network_rate: reader.read_ranged(fields, "network_rate", base.map(|b| b.network_rate), SHARE),
            source: fields.read_text("source", None),
        }
    }

    fn write(&self, path: &str, out: &mut String) {
        let _ = write!(
            out,
            "\n[{path}]\neager_ns = {:?}\nnetwork_rate = {:?}\n",
            self.eager_ns, self.network_rate
        );
        let _ = writeln!(out, "source = {}", quote_toml(&self.source));
        self.all_reduce.write(&format!("{path}.all_reduce"), out);
        self.gather.write(&format!("{path}.gather"), out);
        self.all_to_all.write(&format!("{path}.all_to_all"), out);
        self.broadcast.write(&format!("{path}.broadcast"), out);
        self.send.write(&format!("{path}.send"), out);
    }
}

impl ProfileTable for AlgorithmLines {
    fn read(
        reader: &mut ProfileReader<'_>,
        fields: &mut ConfigReader<'_>,
        _base: Option<&AlgorithmLines>,
    ) -> AlgorithmLines {
        let mut list = |key| reader.read_cost_lines(fields, key);
        let lines = AlgorithmLines {
            one_shot: list("one_shot"),
            tree: list("tree"),
            ring: list("ring"),
            direct: list("direct"),
            switch: list("switch"),
            ring_from_bytes: Some(fields.read_number("ring_from_bytes", Some(-1.0))).filter(|x| *x >= 0.0),
        };
        if lines.tree.len() + lines.ring.len() + lines.direct.len() == 0 {
            let tree = fields.qualified_key("tree");
            let op = tree.split('.').rev().nth(1).unwrap_or_default();
            reader.found.push(
                Diagnostic::error(&T1106, format!("`{op}` has no cost line"))
                    .with_label(reader.file, &tree)
                    .with_hint(
                        "give at least one of tree, ring and direct, which work on any number of ranks",
                    ),
            );
        }
        lines
    }

    fn write(&self, path: &str, out: &mut String) {
        let _ = write!(out, "\n[{path}]\n");
        if let Some(b) = self.ring_from_bytes {
            let _ = writeln!(out, "ring_from_bytes = {b:?}");
        }
        let lists = [
            ("one_shot", &self.one_shot),
            ("tree", &self.tree),
            ("ring", &self.ring),
            ("direct", &self.direct),
            ("switch", &self.switch),
        ];
        for (key, list) in lists.into_iter().filter(|(_, list)| !list.is_empty()) {
            let _ = writeln!(out, "{key} = [");
            for l in list {
                let _ = writeln!(
                    out,
                    "  {{ base_ns = {:?}, hop_ns = {:?}, rate = {:?}, self_copy = {:?}, network_share = {:?} }},",
                    l.base_ns, l.hop_ns, l.rate_share, l.self_copy, l.network_share
                );
            }
            out.push_str("]\n");
        }
    }
}

struct ProfileReader<'a> {
    file: &'a str,
    found: Diagnostics,
}

impl ProfileReader<'_> {
    fn read_ranged(
        &mut self,
        fields: &mut ConfigReader<'_>,
        key: &'static str,
        default: Option<f64>,
        range: RangeInclusive<f64>,
    ) -> f64 {
        let x = fields.read_number(key, default);
        if !range.contains(&x) {
            self.found.push(
                Diagnostic::error(&T1106, format!("`{}` is {x}", fields.qualified_key(key)))
                    .with_label(self.file, format!("must be {} to {:e}", range.start(), range.end())),
            );
        }
        x
    }

    /// Reads the jobs for which the profile was validated.
    fn read_jobs(&mut self, fields: &mut ConfigReader<'_>) -> Vec<String> {
        let listed = fields.take_value("validated");
        let jobs: Option<Vec<String>> = match listed.as_ref().map(|v| v.as_array()) {
            None => Some(Vec::new()),
            Some(items) => items.and_then(|items| {
                let known = |job: &&str| JOBS.contains(job);
                items.iter().map(|v| v.as_str().filter(known).map(str::to_string)).collect()
            }),
        };
        jobs.unwrap_or_else(|| {
            self.found.push(
                Diagnostic::error(&T1106, "`validated` is not a list of jobs")
                    .with_label(self.file, format!("jobs are {}", format_choices(&JOBS))),
            );
            Vec::new()
        })
    }

    /// Reads the table `key`, or returns the base value if the table is absent. A present table
    /// names its own source.
    fn read_table<T: ProfileTable>(
        &mut self,
        fields: &mut ConfigReader<'_>,
        key: &'static str,
        base: Option<&T>,
    ) -> T {
        match (fields.read_optional_table(key), base) {
            (None, Some(base)) => base.clone(),
            (table, base) => {
                let mut table = table.unwrap_or_else(|| fields.read_table(key));
                let value = T::read(self, &mut table, base);
                self.found.extend(table.finish());
                value
            }
        }
    }

    fn read_curves(&mut self, fields: &mut ConfigReader<'_>, base: Option<&Curves>) -> Curves {
        let none = OverlapTraits {
            tp: TpOverlap::Nothing,
            chunk_rows: 1024.0,
            fuses_weight_gradient: false,
            overlaps_gathers: false,
            overlaps_dispatch: false,
            source: "the profile does not state an overlap".to_string(),
        };
        Curves {
            gemms: self.read_gemm_curves(fields, base),
            attention: self.read_table(fields, "attention", base.map(|b| &b.attention)),
            grouped_gemm: self.read_table(fields, "grouped_gemm", base.map(|b| &b.grouped_gemm)),
            memory: self.read_table(fields, "memory", base.map(|b| &b.memory)),
            host: self.read_table(fields, "host", base.map(|b| &b.host)),
            library: self.read_table(fields, "library", base.map(|b| &b.library)),
            overlap: self.read_table(fields, "overlap", Some(base.map_or(&none, |b| &b.overlap))),
        }
    }

    /// Reads one curve per precision. A precision without a curve takes that of the base, or else
    /// that of the next wider precision, or of the widest one that has a curve.
    fn read_gemm_curves(&mut self, fields: &mut ConfigReader<'_>, base: Option<&Curves>) -> [GemmCurve; 4] {
        let mut gemms = fields.read_table("gemms");
        let mut read: [Option<GemmCurve>; 4] = [const { None }; 4];
        for p in Precision::ALL {
            let before = base.map(|b| b.gemm_curve(p));
            if let Some(mut table) = gemms.read_optional_table(p.name()) {
                read[p as usize] = Some(GemmCurve::read(self, &mut table, before));
                self.found.extend(table.finish());
            }
        }
        self.found.extend(gemms.finish());
        let mut last = read.iter().flatten().next().cloned();
        Precision::ALL.map(|p| {
            let own = read[p as usize].take();
            let value = own.or_else(|| base.map(|b| b.gemm_curve(p).clone())).or_else(|| last.clone());
            last.clone_from(&value);
            value.unwrap_or_else(|| {
                self.found.push(
                    Diagnostic::error(&T1106, "the profile has no GEMM curve")
                        .with_label(self.file, "`gemms` is empty")
                        .with_hint("give at least gemms.bf16"),
                );
                GemmCurve {
                    max_efficiency: 1.0,
                    share: 1.0,
                    m_half: 0.0,
                    n_half: 0.0,
                    k_half: 0.0,
                    start_ns: 0.0,
                    source: String::new(),
                }
            })
        })
    }

    fn read_cost_lines(&mut self, fields: &mut ConfigReader<'_>, key: &'static str) -> Vec<CostLine> {
        let mut lines = Vec::new();
        for (_, mut f) in fields.read_tables(key) {
            lines.push(CostLine {
                base_ns: self.read_ranged(&mut f, "base_ns", None, NON_NEGATIVE),
                hop_ns: self.read_ranged(&mut f, "hop_ns", Some(0.0), NON_NEGATIVE),
                rate_share: self.read_ranged(&mut f, "rate", None, 1e-6..=2.0),
                self_copy: self.read_ranged(&mut f, "self_copy", Some(0.0), NON_NEGATIVE),
                network_share: self.read_ranged(&mut f, "network_share", Some(1.0), SHARE),
            });
            self.found.extend(f.finish());
        }
        lines
    }
}

/// Writes the tables of curves except those equal to `base`.
fn write_curves(out: &mut String, path: &str, c: &Curves, base: Option<&Curves>) {
    for p in Precision::ALL {
        let name = format!("gemms.{}", p.name());
        write_table(out, path, &name, c.gemm_curve(p), base.map(|b| b.gemm_curve(p)));
    }
    write_table(out, path, "attention", &c.attention, base.map(|b| &b.attention));
    write_table(out, path, "grouped_gemm", &c.grouped_gemm, base.map(|b| &b.grouped_gemm));
    write_table(out, path, "memory", &c.memory, base.map(|b| &b.memory));
    write_table(out, path, "host", &c.host, base.map(|b| &b.host));
    write_table(out, path, "overlap", &c.overlap, base.map(|b| &b.overlap));
    write_table(out, path, "library", &c.library, base.map(|b| &b.library));
}

fn write_table<T: ProfileTable>(out: &mut String, path: &str, name: &str, table: &T, base: Option<&T>) {
    if base != Some(table) {
        table.write(&format!("{path}{name}"), out);
    }
}
