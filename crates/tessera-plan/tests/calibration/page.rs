//! docs/reference/calibration.md.

use std::fmt::Write;

use super::runs::{Layer, Pair, Scaling, Trained, spread};

/// The whole page.
pub fn page(trained: &[Trained], layers: &[Layer], now: &Scaling, limited: &[(&str, Scaling)]) -> String {
    let mut out = String::from(HEAD);
    iterations(&mut out, trained);
    layer(&mut out, layers);
    memory(&mut out, trained);
    scaling(&mut out, now, limited);
    out
}

const HEAD: &str = "\
# Calibration

Estimates under the profile `megatron` on the cluster `hgx-a100`, against runs that others published. Printed by
`TESSERA_BLESS=1 cargo test -p tessera-plan --test calibration` and compared by that test, which also holds the errors
below their bars. No number belongs to one row.

What was fitted is one number: 300, the size at which one dim of a product costs it half of its rate, on the four
iteration times of the 22B and the 175B model. It goes with the share of the peak that the largest products reach, which
was set to 0.87 (about 270 of an A100's 312 TFLOP/s).
Everything else is taken from data sheets or is a constant of the executor whose source the profile names,
`crates/tessera-cost/profiles/megatron.toml`. What is not marked *fitted* was held out.
";

fn iterations(out: &mut String, trained: &[Trained]) {
    out.push_str(
        "
## Iteration time

Korthikanti et al. 2022, table 5. Seconds; full: everything is computed again; selective: attention is computed again,
sequence parallel. Embedding, head, pipeline, sends between stages and optimizer are in it.

| model | arrangement | | full | estimated | error | selective | estimated | error |
| --- | --- | --- | --- | --- | --- | --- | --- | --- |
",
    );
    for t in trained {
        let _ = write!(out, "| {} | {} | {} |", t.model, t.arrangement, if t.fitted { "fitted" } else { "" });
        for p in &t.iteration {
            let _ = write!(out, " {:.2} | {:.2} | {} |", p.published, p.estimated, error(p));
        }
        out.push('\n');
    }
    let of = |fitted: Option<bool>| -> Vec<Pair> {
        let some = trained.iter().filter(|t| fitted.is_none_or(|f| t.fitted == f));
        some.flat_map(|t| t.iteration).collect()
    };
    say(out, "All eight", &of(None));
    say(out, "The four that were held out", &of(Some(false)));
}

fn layer(out: &mut String, layers: &[Layer]) {
    out.push_str(
        "
## One layer

The same, table 4: a layer of the 22B model, micro-batch 4, tp 8, milliseconds. Not fitted by itself; the model's whole iterations were.

| variant | forward | estimated | error | backward | estimated | error |
| --- | --- | --- | --- | --- | --- | --- |
",
    );
    for l in layers {
        let _ = write!(out, "| {} |", l.variant);
        for p in [&l.forward, &l.backward] {
            let _ = write!(out, " {:.1} | {:.2} | {} |", p.published, p.estimated, error(p));
        }
        out.push('\n');
    }
    let all: Vec<Pair> = layers.iter().flat_map(|l| [l.forward, l.backward]).collect();
    say(out, "All ten", &all);
}

fn memory(out: &mut String, trained: &[Trained]) {
    out.push_str(
        "
## Memory

The same, figure 1, GiB on a rank of the first stage. *State* is weights, gradients and optimizer, 18 bytes per parameter. Only
layers are compared, which is what the published numbers add up to; a budget counts embedding and head as well.

| model | state | estimated | error | activations | estimated | error | selective | estimated | error |
| --- | --- | --- | --- | --- | --- | --- | --- | --- | --- |
",
    );
    for t in trained {
        let _ = write!(out, "| {} |", t.model);
        for p in [&t.state, &t.activations[0], &t.activations[1]] {
            let _ = write!(out, " {:.2} | {:.2} | {} |", p.published, p.estimated, error(p));
        }
        out.push('\n');
    }
    say(out, "State", &trained.iter().map(|t| t.state).collect::<Vec<_>>());
    say(out, "Activations", &trained.iter().flat_map(|t| t.activations).collect::<Vec<_>>());
    out.push_str(
        "
Figure 7, activations in per cent of tensor parallel alone: published / estimated.

| model | sequence parallel | attention again | both | all again |
| --- | --- | --- | --- | --- |
",
    );
    for t in trained {
        let _ = write!(out, "| {} |", t.model);
        for p in &t.shares {
            let _ = write!(out, " {:.2} / {:.2} |", p.published, p.estimated);
        }
        out.push('\n');
    }
    say(out, "All sixteen, of the percentage", &trained.iter().flat_map(|t| t.shares).collect::<Vec<_>>());
}

fn scaling(out: &mut String, now: &Scaling, limited: &[(&str, Scaling)]) {
    let _ = write!(
        out,
        "
## Scaling

Narayanan et al. 2021, TFLOP/s per device, recomputation counted as the paper does. The source names neither micro-batch nor
interleaving: the planner chose them, the fastest that fit (micro-batches 1 to 16; any number of pieces that divides a stage's
layers). One scalar for all rows, {:.3}, is the only number fitted here.

| model | devices | arrangement | micro-batch | pieces | published | estimated | error |
| --- | --- | --- | --- | --- | --- | --- | --- |
",
        now.scalar
    );
    for (r, p) in now.rows.iter().zip(now.rates()) {
        let _ = writeln!(
            out,
            "| {} | {} | {} | {} | {} | {:.0} | {:.1} | {} |",
            r.model,
            r.devices,
            r.arrangement,
            r.micro_batch,
            r.interleave,
            p.published,
            p.estimated,
            error(&p)
        );
    }
    say(out, "All ten", &now.rates());
    let _ = write!(
        out,
        "Rank correlation with the table: {:.2}. The best constant rate for all rows has a mean error of 5.4 %.

Under other assumptions, each with its own scalar:

| assumption | scalar | mean error | rank correlation |
| --- | --- | --- | --- |
",
        now.rank_correlation()
    );
    for (name, s) in limited {
        let (mean, _) = spread(&s.rates());
        let _ = writeln!(
            out,
            "| {name} | {:.3} | {:.1} % | {:.2} |",
            s.scalar,
            100.0 * mean,
            s.rank_correlation()
        );
    }
}

fn error(p: &Pair) -> String {
    format!("{:+.1} %", 100.0 * p.error())
}

fn say(out: &mut String, what: &str, pairs: &[Pair]) {
    let (mean, most) = spread(pairs);
    let _ = write!(out, "\n{what}: mean error {:.2} %, largest {:.2} %.\n", 100.0 * mean, 100.0 * most);
}
