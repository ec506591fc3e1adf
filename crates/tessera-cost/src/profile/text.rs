//! The file of a profile: TOML in, TOML out.

use std::collections::BTreeMap;
use std::fmt::Write;

use tessera_base::fields::{Fields, quoted, toml};
use tessera_base::{Diagnostic, Diagnostics, choices};
use tessera_mesh::Precision;

use super::{
    Attention, Curves, Experts, Hides, Host, JOBS, Library, Line, Lines, Memory, Overlap, Product, Profile,
    T1106,
};
use crate::habits::Habits;

impl Profile {
    /// A profile from its file's text; `file` is what diagnostics call it.
    ///
    /// # Errors
    /// T0001 to T0004 for a text that cannot be read, T1106 for a curve out of range.
    pub fn parse(file: &str, text: &str) -> Result<Profile, Diagnostics> {
        let mut top = Fields::new(file, "", toml(file, text)?);
        let mut reader = Reader { file, found: Vec::new() };
        let name = top.text("name", None);
        let title = top.text("title", None);
        let error = reader.ranged(&mut top, "error", None, 0.0, 10.0);
        let validated = reader.jobs(&mut top);
        let mut table = top.table("habits");
        let habits = Habits::take(&mut table);
        reader.found.extend(table.finish());
        let base = reader.curves(&mut top, None);
        let families: BTreeMap<String, Curves> = top
            .each("families")
            .into_iter()
            .map(|(family, mut fields)| {
                let curves = reader.curves(&mut fields, Some(&base));
                reader.found.extend(fields.finish());
                (family, curves)
            })
            .collect();
        reader.found.extend(top.finish());
        if reader.found.is_empty() {
            Ok(Profile { name, title, error, validated, habits, base, families })
        } else {
            Err(reader.found)
        }
    }

    /// The profile's file. [`Profile::parse`] of it gives the profile back.
    #[must_use]
    pub fn text(&self) -> String {
        let mut out = format!(
            "name = {}\ntitle = {}\nerror = {:?}\nvalidated = [{}]\n",
            quoted(&self.name),
            quoted(&self.title),
            self.error,
            self.validated.iter().map(|v| quoted(v)).collect::<Vec<_>>().join(", ")
        );
        let _ = write!(out, "\n[habits]\n{}", self.habits.text());
        tables(&mut out, "", &self.base, None);
        for (family, curves) in &self.families {
            let path = format!("families.{family}.");
            let before = out.len();
            tables(&mut out, &path, curves, Some(&self.base));
            if out.len() == before {
                let _ = write!(out, "\n[families.{family}]\n");
            }
        }
        out
    }
}

struct Reader<'a> {
    file: &'a str,
    found: Diagnostics,
}

impl Reader<'_> {
    fn ranged(
        &mut self,
        fields: &mut Fields<'_>,
        key: &'static str,
        default: Option<f64>,
        least: f64,
        most: f64,
    ) -> f64 {
        let x = fields.number(key, default);
        if !(least..=most).contains(&x) {
            self.found.push(
                Diagnostic::error(&T1106, format!("`{}` is {x}", fields.full(key)))
                    .at(self.file, format!("must be {least} to {most:e}")),
            );
        }
        x
    }

    /// Jobs that the profile was validated for.
    fn jobs(&mut self, fields: &mut Fields<'_>) -> Vec<String> {
        let listed = fields.take("validated");
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
                    .at(self.file, format!("jobs are {}", choices(&JOBS))),
            );
            Vec::new()
        })
    }

    fn share(&mut self, fields: &mut Fields<'_>, key: &'static str, default: Option<f64>) -> f64 {
        self.ranged(fields, key, default, 1e-6, 1.0)
    }

    fn positive(&mut self, fields: &mut Fields<'_>, key: &'static str, default: Option<f64>) -> f64 {
        self.ranged(fields, key, default, 0.0, 1e15)
    }

    /// The table of that name, or what stands in for it; a table that is there names its own source.
    fn part<T: Clone>(
        &mut self,
        fields: &mut Fields<'_>,
        key: &'static str,
        base: Option<&T>,
        read: impl FnOnce(&mut Self, &mut Fields<'_>, Option<&T>) -> T,
    ) -> T {
        match (fields.table_if(key), base) {
            (None, Some(base)) => base.clone(),
            (table, base) => {
                let mut table = table.unwrap_or_else(|| fields.table(key));
                let value = read(self, &mut table, base);
                self.found.extend(table.finish());
                value
            }
        }
    }

    fn curves(&mut self, fields: &mut Fields<'_>, base: Option<&Curves>) -> Curves {
        let mut products = fields.table("products");
        let mut read: [Option<Product>; 4] = [const { None }; 4];
        for p in Precision::ALL {
            let before = base.map(|b| b.product(p));
            if let Some(mut table) = products.table_if(p.name()) {
                read[p as usize] = Some(self.product(&mut table, before));
                self.found.extend(table.finish());
            }
        }
        self.found.extend(products.finish());
        let nothing = Overlap {
            tp: Hides::Nothing,
            chunk_rows: 1024.0,
            weight_gradient_fused: false,
            gathers: false,
            exchanges: false,
            source: "nothing is said of it".to_string(),
        };
        let any = read.iter().flatten().next().cloned();
        let mut last = any.clone();
        let products = Precision::ALL.map(|p| {
            let own = read[p as usize].clone();
            let value = own.or_else(|| base.map(|b| b.product(p).clone())).or_else(|| last.clone());
            last.clone_from(&value);
            value.unwrap_or_else(|| {
                self.found.push(
                    Diagnostic::error(&T1106, "the profile names no product")
                        .at(self.file, "products is empty")
                        .hint("give at least products.bf16"),
                );
                Product {
                    most: 1.0,
                    share: 1.0,
                    m_half: 0.0,
                    n_half: 0.0,
                    k_half: 0.0,
                    start_ns: 0.0,
                    source: String::new(),
                }
            })
        });
        Curves {
            products,
            attention: self.part(fields, "attention", base.map(|b| &b.attention), |r, f, b| Attention {
                share: r.share(f, "share", b.map(|b| b.share)),
                queries_half: r.positive(f, "queries_half", b.map(|b| b.queries_half)),
                keys_half: r.positive(f, "keys_half", b.map(|b| b.keys_half)),
                memory_share: r.share(f, "memory_share", b.map(|b| b.memory_share)),
                start_ns: r.positive(f, "start_ns", b.map(|b| b.start_ns)),
                stores_scores: f.flag("stores_scores", b.is_some_and(|b| b.stores_scores)),
                source: f.text("source", None),
            }),
            experts: self.part(fields, "experts", base.map(|b| &b.experts), |r, f, b| Experts {
                share: r.share(f, "share", b.map(|b| b.share)),
                rows_half: r.positive(f, "rows_half", b.map(|b| b.rows_half)),
                memory_share: r.share(f, "memory_share", Some(b.map_or(1.0, |b| b.memory_share))),
                start_ns: r.positive(f, "start_ns", b.map(|b| b.start_ns)),
                source: f.text("source", None),
            }),
            memory: self.part(fields, "memory", base.map(|b| &b.memory), |r, f, b| Memory {
                share: r.share(f, "share", b.map(|b| b.share)),
                start_ns: r.positive(f, "start_ns", b.map(|b| b.start_ns)),
                reserved_bytes: r.positive(f, "reserved_bytes", b.map(|b| b.reserved_bytes)),
                cached_bytes: r.positive(f, "cached_bytes", Some(b.map_or(0.0, |b| b.cached_bytes))),
                cached_times: r.ranged(
                    f,
                    "cached_times",
                    Some(b.map_or(1.0, |b| b.cached_times)),
                    1.0,
                    1000.0,
                ),
                source: f.text("source", None),
            }),
            host: self.part(fields, "host", base.map(|b| &b.host), |r, f, b| Host {
                launch_ns: r.positive(f, "launch_ns", b.map(|b| b.launch_ns)),
                captured: f.flag("captured", b.is_some_and(|b| b.captured)),
                contention: r.ranged(f, "contention", b.map(|b| b.contention), 1.0, 100.0),
                source: f.text("source", None),
            }),
            library: self.part(fields, "library", base.map(|b| &b.library), Reader::library),
            overlap: self.part(fields, "overlap", Some(base.map_or(&nothing, |b| &b.overlap)), |r, f, b| {
                let words = Hides::ALL.map(Hides::name);
                let word = f.word("tp", &words, b.map_or(words[0], |b| b.tp.name()));
                Overlap {
                    tp: Hides::ALL.into_iter().find(|h| h.name() == word).unwrap_or(Hides::Nothing),
                    chunk_rows: r.positive(f, "chunk_rows", b.map(|b| b.chunk_rows)),
                    weight_gradient_fused: f
                        .flag("weight_gradient_fused", b.is_some_and(|b| b.weight_gradient_fused)),
                    gathers: f.flag("gathers", b.is_some_and(|b| b.gathers)),
                    exchanges: f.flag("exchanges", b.is_some_and(|b| b.exchanges)),
                    source: f.text("source", None),
                }
            }),
        }
    }

    fn product(&mut self, f: &mut Fields<'_>, b: Option<&Product>) -> Product {
        Product {
            most: self.share(f, "most", b.map(|b| b.most)),
            share: self.ranged(f, "share", b.map(|b| b.share), 1e-6, 2.0),
            m_half: self.positive(f, "m_half", b.map(|b| b.m_half)),
            n_half: self.positive(f, "n_half", b.map(|b| b.n_half)),
            k_half: self.positive(f, "k_half", b.map(|b| b.k_half)),
            start_ns: self.positive(f, "start_ns", b.map(|b| b.start_ns)),
            source: f.text("source", None),
        }
    }

    fn library(&mut self, f: &mut Fields<'_>, b: Option<&Library>) -> Library {
        let mut op = |f: &mut Fields<'_>, key: &'static str, base: Option<&Lines>| match f.table_if(key) {
            None if base.is_some() => base.cloned().unwrap_or_default(),
            table => {
                let mut table = table.unwrap_or_else(|| f.table(key));
                let lines = self.lines(&mut table, key);
                self.found.extend(table.finish());
                lines
            }
        };
        let (all_reduce, gather) =
            (op(f, "all_reduce", b.map(|b| &b.all_reduce)), op(f, "gather", b.map(|b| &b.gather)));
        let (all_to_all, broadcast) =
            (op(f, "all_to_all", b.map(|b| &b.all_to_all)), op(f, "broadcast", b.map(|b| &b.broadcast)));
        let send = op(f, "send", b.map(|b| &b.send));
        Library {
            all_reduce,
            gather,
            all_to_all,
            broadcast,
            send,
            eager_ns: self.positive(f, "eager_ns", b.map(|b| b.eager_ns)),
            out_rate: self.share(f, "out_rate", b.map(|b| b.out_rate)),
            source: f.text("source", None),
        }
    }

    fn lines(&mut self, f: &mut Fields<'_>, op: &'static str) -> Lines {
        let mut list = |f: &mut Fields<'_>, key: &'static str| -> Vec<Line> {
            f.each(key)
                .into_iter()
                .map(|(_, mut f)| {
                    let line = Line {
                        base_ns: self.positive(&mut f, "base_ns", None),
                        hop_ns: self.positive(&mut f, "hop_ns", Some(0.0)),
                        rate: self.ranged(&mut f, "rate", None, 1e-6, 2.0),
                        own: self.positive(&mut f, "own", Some(0.0)),
                        far: self.share(&mut f, "far", Some(1.0)),
                    };
                    self.found.extend(f.finish());
                    line
                })
                .collect()
        };
        let lines = Lines {
            one_shot: list(f, "one_shot"),
            tree: list(f, "tree"),
            ring: list(f, "ring"),
            direct: list(f, "direct"),
            switch: list(f, "switch"),
            ring_from_bytes: Some(f.number("ring_from_bytes", Some(-1.0))).filter(|x| *x >= 0.0),
        };
        if lines.tree.len() + lines.ring.len() + lines.direct.len() == 0 {
            self.found.push(
                Diagnostic::error(&T1106, format!("no line for `{op}`"))
                    .at(self.file, f.full("tree"))
                    .hint("give at least one of tree, ring and direct: they work on any number of ranks"),
            );
        }
        lines
    }
}

/// The tables of curves, those equal to `base` left out.
fn tables(out: &mut String, path: &str, c: &Curves, base: Option<&Curves>) {
    let mut table = |name: &str, same: bool, numbers: &[(&str, f64)], more: String, source: &str| {
        if same {
            return;
        }
        let _ = write!(out, "\n[{path}{name}]\n");
        for (key, x) in numbers {
            let _ = writeln!(out, "{key} = {x:?}");
        }
        let _ = writeln!(out, "{more}source = {}", quoted(source));
    };
    for p in Precision::ALL {
        let x = c.product(p);
        table(
            &format!("products.{}", p.name()),
            base.is_some_and(|b| b.product(p) == x),
            &[
                ("most", x.most),
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
    let x = &c.experts;
    table(
        "experts",
        base.is_some_and(|b| b.experts == *x),
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
            ("cached_times", x.cached_times),
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
            "tp = \"{}\"\nweight_gradient_fused = {}\ngathers = {}\nexchanges = {}\n",
            x.tp.name(),
            x.weight_gradient_fused,
            x.gathers,
            x.exchanges
        ),
        &x.source,
    );
    let x = &c.library;
    if base.is_some_and(|b| b.library == *x) {
        return;
    }
    table("library", false, &[("eager_ns", x.eager_ns), ("out_rate", x.out_rate)], String::new(), &x.source);
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
                    "  {{ base_ns = {:?}, hop_ns = {:?}, rate = {:?}, own = {:?}, far = {:?} }},",
                    l.base_ns, l.hop_ns, l.rate, l.own, l.far
                );
            }
            out.push_str("]\n");
        }
    }
}
