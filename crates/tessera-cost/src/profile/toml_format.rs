//! The TOML format of a profile: reader and writer.

use std::collections::BTreeMap;
use std::fmt::Write;

use tessera_base::config::{ConfigReader, parse_toml, quote_toml};
use tessera_base::{Diagnostic, Diagnostics, format_choices};
use tessera_mesh::Precision;

use super::renamed_keys::{
    RENAMED_GEMM, RENAMED_LIBRARY, RENAMED_LINE, RENAMED_MEMORY, RENAMED_OVERLAP, RENAMED_TABLES,
};
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
        top.set_renamed_keys(RENAMED_TABLES);
        let mut reader = ProfileReader { file, found: Vec::new() };
        let name = top.read_text("name", None);
        let title = top.read_text("title", None);
        let error = reader.read_ranged(&mut top, "error", None, 0.0, 10.0);
        let validated = reader.read_jobs(&mut top);
        let mut table = top.read_table("executor");
        let executor = ExecutorTraits::from_config(&mut table);
        reader.found.extend(table.finish());
        let base = reader.read_curves(&mut top, None);
        let families: BTreeMap<String, Curves> = top
            .read_tables("families")
            .into_iter()
            .map(|(family, mut fields)| {
                fields.set_renamed_keys(RENAMED_TABLES);
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
        write_tables(&mut out, "", &self.base, None);
        for (family, curves) in &self.families {
            let path = format!("families.{family}.");
            let before = out.len();
            write_tables(&mut out, &path, curves, Some(&self.base));
            if out.len() == before {
                let _ = write!(out, "\n[families.{family}]\n");
            }
        }
        out
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
        least: f64,
        most: f64,
    ) -> f64 {
        let x = fields.read_number(key, default);
        if !(least..=most).contains(&x) {
            self.found.push(
                Diagnostic::error(&T1106, format!("`{}` is {x}", fields.qualified_key(key)))
                    .with_label(self.file, format!("must be {least} to {most:e}")),
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

    fn read_share(&mut self, fields: &mut ConfigReader<'_>, key: &'static str, default: Option<f64>) -> f64 {
        self.read_ranged(fields, key, default, 1e-6, 1.0)
    }

    fn read_non_negative(
        &mut self,
        fields: &mut ConfigReader<'_>,
        key: &'static str,
        default: Option<f64>,
    ) -> f64 {
        self.read_ranged(fields, key, default, 0.0, 1e15)
    }

    /// Reads the table `key`, or returns the base value if the table is absent. A present table
    /// names its own source.
    fn read_table<T: Clone>(
        &mut self,
        fields: &mut ConfigReader<'_>,
        key: &'static str,
        base: Option<&T>,
        read: impl FnOnce(&mut Self, &mut ConfigReader<'_>, Option<&T>) -> T,
    ) -> T {
        match (fields.read_optional_table(key), base) {
            (None, Some(base)) => base.clone(),
            (table, base) => {
                let mut table = table.unwrap_or_else(|| fields.read_table(key));
                let value = read(self, &mut table, base);
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
            attention: self.read_table(
                fields,
                "attention",
                base.map(|b| &b.attention),
                Self::read_attention_curve,
            ),
            grouped_gemm: self.read_table(
                fields,
                "grouped_gemm",
                base.map(|b| &b.grouped_gemm),
                Self::read_grouped_gemm_curve,
            ),
            memory: self.read_table(fields, "memory", base.map(|b| &b.memory), Self::read_memory_curve),
            host: self.read_table(fields, "host", base.map(|b| &b.host), Self::read_host_costs),
            library: self.read_table(fields, "library", base.map(|b| &b.library), Self::read_library),
            overlap: self.read_table(
                fields,
                "overlap",
                Some(base.map_or(&none, |b| &b.overlap)),
                Self::read_overlap_traits,
            ),
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
                read[p as usize] = Some(self.read_gemm_curve(&mut table, before));
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

    fn read_attention_curve(
        &mut self,
        f: &mut ConfigReader<'_>,
        b: Option<&AttentionCurve>,
    ) -> AttentionCurve {
        AttentionCurve {
            share: self.read_share(f, "share", b.map(|b| b.share)),
            queries_half: self.read_non_negative(f, "queries_half", b.map(|b| b.queries_half)),
            keys_half: self.read_non_negative(f, "keys_half", b.map(|b| b.keys_half)),
            memory_share: self.read_share(f, "memory_share", b.map(|b| b.memory_share)),
            start_ns: self.read_non_negative(f, "start_ns", b.map(|b| b.start_ns)),
            stores_scores: f.read_flag("stores_scores", b.is_some_and(|b| b.stores_scores)),
            source: f.read_text("source", None),
        }
    }

    fn read_grouped_gemm_curve(
        &mut self,
        f: &mut ConfigReader<'_>,
        b: Option<&GroupedGemmCurve>,
    ) -> GroupedGemmCurve {
        GroupedGemmCurve {
            share: self.read_share(f, "share", b.map(|b| b.share)),
            rows_half: self.read_non_negative(f, "rows_half", b.map(|b| b.rows_half)),
            memory_share: self.read_share(f, "memory_share", Some(b.map_or(1.0, |b| b.memory_share))),
            start_ns: self.read_non_negative(f, "start_ns", b.map(|b| b.start_ns)),
            source: f.read_text("source", None),
        }
    }

    fn read_memory_curve(&mut self, f: &mut ConfigReader<'_>, b: Option<&MemoryCurve>) -> MemoryCurve {
        f.set_renamed_keys(RENAMED_MEMORY);
        let cached_speedup = Some(b.map_or(1.0, |b| b.cached_speedup));
        MemoryCurve {
            share: self.read_share(f, "share", b.map(|b| b.share)),
            start_ns: self.read_non_negative(f, "start_ns", b.map(|b| b.start_ns)),
            reserved_bytes: self.read_non_negative(f, "reserved_bytes", b.map(|b| b.reserved_bytes)),
            cached_bytes: self.read_non_negative(f, "cached_bytes", Some(b.map_or(0.0, |b| b.cached_bytes))),
            cached_speedup: self.read_ranged(f, "cached_speedup", cached_speedup, 1.0, 1000.0),
            source: f.read_text("source", None),
        }
    }

    fn read_host_costs(&mut self, f: &mut ConfigReader<'_>, b: Option<&HostCosts>) -> HostCosts {
        HostCosts {
            launch_ns: self.read_non_negative(f, "launch_ns", b.map(|b| b.launch_ns)),
            captured: f.read_flag("captured", b.is_some_and(|b| b.captured)),
            contention: self.read_ranged(f, "contention", b.map(|b| b.contention), 1.0, 100.0),
            source: f.read_text("source", None),
        }
    }

    fn read_overlap_traits(&mut self, f: &mut ConfigReader<'_>, b: Option<&OverlapTraits>) -> OverlapTraits {
        f.set_renamed_keys(RENAMED_OVERLAP);
        let names = TpOverlap::ALL.map(TpOverlap::name);
        let name = f.read_choice("tp", &names, b.map_or(names[0], |b| b.tp.name()));
        let tp = TpOverlap::ALL.into_iter().find(|o| o.name() == name);
        OverlapTraits {
            tp: tp.unwrap_or(TpOverlap::Nothing),
            chunk_rows: self.read_non_negative(f, "chunk_rows", b.map(|b| b.chunk_rows)),
            fuses_weight_gradient: f
                .read_flag("fuses_weight_gradient", b.is_some_and(|b| b.fuses_weight_gradient)),
            overlaps_gathers: f.read_flag("overlaps_gathers", b.is_some_and(|b| b.overlaps_gathers)),
            overlaps_dispatch: f.read_flag("overlaps_dispatch", b.is_some_and(|b| b.overlaps_dispatch)),
            source: f.read_text("source", None),
        }
    }

    fn read_gemm_curve(&mut self, f: &mut ConfigReader<'_>, b: Option<&GemmCurve>) -> GemmCurve {
        f.set_renamed_keys(RENAMED_GEMM);
        GemmCurve {
            max_efficiency: self.read_share(f, "max_efficiency", b.map(|b| b.max_efficiency)),
            share: self.read_ranged(f, "share", b.map(|b| b.share), 1e-6, 2.0),
            m_half: self.read_non_negative(f, "m_half", b.map(|b| b.m_half)),
            n_half: self.read_non_negative(f, "n_half", b.map(|b| b.n_half)),
            k_half: self.read_non_negative(f, "k_half", b.map(|b| b.k_half)),
            start_ns: self.read_non_negative(f, "start_ns", b.map(|b| b.start_ns)),
            source: f.read_text("source", None),
        }
    }

    fn read_library(&mut self, f: &mut ConfigReader<'_>, b: Option<&CollectiveLibrary>) -> CollectiveLibrary {
        f.set_renamed_keys(RENAMED_LIBRARY);
        let mut op = |f: &mut ConfigReader<'_>, key: &'static str, base: Option<&AlgorithmLines>| match f
            .read_optional_table(key)
        {
            None if base.is_some() => base.cloned().unwrap_or_default(),
            table => {
                let mut table = table.unwrap_or_else(|| f.read_table(key));
                let lines = self.read_lines(&mut table, key);
                self.found.extend(table.finish());
                lines
            }
        };
        let (all_reduce, gather) =
            (op(f, "all_reduce", b.map(|b| &b.all_reduce)), op(f, "gather", b.map(|b| &b.gather)));
        let (all_to_all, broadcast) =
            (op(f, "all_to_all", b.map(|b| &b.all_to_all)), op(f, "broadcast", b.map(|b| &b.broadcast)));
        let send = op(f, "send", b.map(|b| &b.send));
        CollectiveLibrary {
            all_reduce,
            gather,
            all_to_all,
            broadcast,
            send,
            eager_ns: self.read_non_negative(f, "eager_ns", b.map(|b| b.eager_ns)),
            network_rate: self.read_share(f, "network_rate", b.map(|b| b.network_rate)),
            source: f.read_text("source", None),
        }
    }

    fn read_lines(&mut self, f: &mut ConfigReader<'_>, op: &'static str) -> AlgorithmLines {
        let mut list = |f: &mut ConfigReader<'_>, key: &'static str| -> Vec<CostLine> {
            f.read_tables(key)
                .into_iter()
                .map(|(_, mut f)| {
                    f.set_renamed_keys(RENAMED_LINE);
                    let line = CostLine {
                        base_ns: self.read_non_negative(&mut f, "base_ns", None),
                        hop_ns: self.read_non_negative(&mut f, "hop_ns", Some(0.0)),
                        rate_share: self.read_ranged(&mut f, "rate", None, 1e-6, 2.0),
                        self_copy: self.read_non_negative(&mut f, "self_copy", Some(0.0)),
                        network_share: self.read_share(&mut f, "network_share", Some(1.0)),
                    };
                    self.found.extend(f.finish());
                    line
                })
                .collect()
        };
        let lines = AlgorithmLines {
            one_shot: list(f, "one_shot"),
            tree: list(f, "tree"),
            ring: list(f, "ring"),
            direct: list(f, "direct"),
            switch: list(f, "switch"),
            ring_from_bytes: Some(f.read_number("ring_from_bytes", Some(-1.0))).filter(|x| *x >= 0.0),
        };
        if lines.tree.len() + lines.ring.len() + lines.direct.len() == 0 {
            self.found.push(
                Diagnostic::error(&T1106, format!("`{op}` has no cost line"))
                    .with_label(self.file, f.qualified_key("tree"))
                    .with_hint(
                        "give at least one of tree, ring and direct, which work on any number of ranks",
                    ),
            );
        }
        lines
    }
}

/// Writes the tables of curves except those equal to `base`.
fn write_tables(out: &mut String, path: &str, c: &Curves, base: Option<&Curves>) {
    let mut table = |name: &str, same: bool, numbers: &[(&str, f64)], more: String, source: &str| {
        if same {
            return;
        }
        let _ = write!(out, "\n[{path}{name}]\n");
        for (key, x) in numbers {
            let _ = writeln!(out, "{key} = {x:?}");
        }
        let _ = writeln!(out, "{more}source = {}", quote_toml(source));
    };
    for p in Precision::ALL {
        let x = c.gemm_curve(p);
        table(
            &format!("gemms.{}", p.name()),
            base.is_some_and(|b| b.gemm_curve(p) == x),
            &[
                ("max_efficiency", x.max_efficiency),
                ("share", x.share),
                ("m_half", x.m_half),
                ("n_half", x.n_half),
                ("k_half", x.k_half),
                ("start_ns", x.start_ns),
            ],
            String::new(),
            &x.source,
        );
    }
    let x = &c.attention;
    table(
        "attention",
        base.is_some_and(|b| b.attention == *x),
        &[
            ("share", x.share),
            ("queries_half", x.queries_half),
            ("keys_half", x.keys_half),
            ("memory_share", x.memory_share),
            ("start_ns", x.start_ns),
        ],
        if x.stores_scores { "stores_scores = true\n".to_string() } else { String::new() },
        &x.source,
    );
    let x = &c.grouped_gemm;
    table(
        "grouped_gemm",
        base.is_some_and(|b| b.grouped_gemm == *x),
        &[
            ("share", x.share),
            ("rows_half", x.rows_half),
            ("memory_share", x.memory_share),
            ("start_ns", x.start_ns),
        ],
        String::new(),
        &x.source,
    );
    let x = &c.memory;
    table(
        "memory",
        base.is_some_and(|b| b.memory == *x),
        &[
            ("share", x.share),
            ("start_ns", x.start_ns),
            ("reserved_bytes", x.reserved_bytes),
            ("cached_bytes", x.cached_bytes),
            ("cached_speedup", x.cached_speedup),
        ],
        String::new(),
        &x.source,
    );
    let x = &c.host;
    table(
        "host",
        base.is_some_and(|b| b.host == *x),
        &[("launch_ns", x.launch_ns), ("contention", x.contention)],
        format!("captured = {}\n", x.captured),
        &x.source,
    );
    let x = &c.overlap;
    table(
        "overlap",
        base.is_some_and(|b| b.overlap == *x),
        &[("chunk_rows", x.chunk_rows)],
        format!(
            "tp = \"{}\"\nfuses_weight_gradient = {}\noverlaps_gathers = {}\noverlaps_dispatch = {}\n",
            x.tp.name(),
            x.fuses_weight_gradient,
            x.overlaps_gathers,
            x.overlaps_dispatch
        ),
        &x.source,
    );
    let x = &c.library;
    if base.is_some_and(|b| b.library == *x) {
        return;
    }
    table(
        "library",
        false,
        &[("eager_ns", x.eager_ns), ("network_rate", x.network_rate)],
        String::new(),
        &x.source,
    );
    let ops = [
        ("all_reduce", &x.all_reduce),
        ("gather", &x.gather),
        ("all_to_all", &x.all_to_all),
        ("broadcast", &x.broadcast),
        ("send", &x.send),
    ];
    for (op, lines) in ops {
        let _ = write!(out, "\n[{path}library.{op}]\n");
        if let Some(b) = lines.ring_from_bytes {
            let _ = writeln!(out, "ring_from_bytes = {b:?}");
        }
        let lists = [
            ("one_shot", &lines.one_shot),
            ("tree", &lines.tree),
            ("ring", &lines.ring),
            ("direct", &lines.direct),
            ("switch", &lines.switch),
        ];
        for (key, list) in lists {
            if list.is_empty() {
                continue;
            }
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
