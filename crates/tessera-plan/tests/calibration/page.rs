//! Renders docs/reference/calibration.md.

use std::fmt::Write;

use super::runs::{LayerRun, Pair, ScalingTable, TrainingRun, mean_and_max_error};

/// Renders the whole page.
pub fn render_page(
    trained: &[TrainingRun],
    layers: &[LayerRun],
    now: &ScalingTable,
    limited: &[(&str, ScalingTable)],
) -> String {
    let mut out = String::from(HEAD);
    iterations(&mut out, trained);
    layer(&mut out, layers);
    memory(&mut out, trained);
    scaling(&mut out, now, limited);
    out
}

const HEAD: &str = "\
# Calibration

Estimates under the profile `megatron` on the cluster `hgx-a100`, against published runs. Printed by
`TESSERA_BLESS=1 cargo test -p tessera-plan --test calibration` and compared by that test, which also keeps the errors
below their bounds. No parameter is specific to one row.

One number was fitted: 300, the size at which one dim of a matmul halves its rate, on the four
iteration times of the 22B and the 175B model. A second parameter, the share of the peak that the largest matmuls reach,
was set to 0.87 (about 270 of an A100's 312 TFLOP/s).
Everything else comes from data sheets or is a constant of the executor whose source the profile names,
`crates/tessera-cost/profiles/megatron.toml`. Rows not marked *fitted* were held out.
";

fn iterations(out: &mut String, trained: &[TrainingRun]) {
    out.push_str(
        "
## Iteration time

Korthikanti et al. 2022, table 5, in seconds. Full: full recomputation; selective: attention is recomputed, with
sequence parallelism. The times include embedding, head, pipeline, sends between stages and optimizer.

| model | mapping | | full | estimated | error | selective | estimated | error |
| --- | --- | --- | --- | --- | --- | --- | --- | --- |
",
    );
    for t in trained {
        let _ = write!(out, "| {} | {} | {} |", t.model, t.layout, if t.fitted { "fitted" } else { "" });
        for p in &t.iteration {
            let _ = write!(out, " {:.2} | {:.2} | {} |", p.published, p.estimated, format_error(p));
        }
        out.push('\n');
    }
    let of = |fitted: Option<bool>| -> Vec<Pair> {
        let some = trained.iter().filter(|t| fitted.is_none_or(|f| t.fitted == f));
        some.flat_map(|t| t.iteration).collect()
    };
    write_errors(out, "All eight", &of(None));
    write_errors(out, "The four that were held out", &of(Some(false)));
}

fn layer(out: &mut String, layers: &[LayerRun]) {
    out.push_str(
        "
## One layer

The same paper, table 4: a layer of the 22B model, micro-batch 4, tp 8, milliseconds. Not fitted by itself; the model's whole iterations were.

| variant | forward | estimated | error | backward | estimated | error |
| --- | --- | --- | --- | --- | --- | --- |
",
    );
    for l in layers {
        let _ = write!(out, "| {} |", l.variant);
        for p in [&l.forward, &l.backward] {
            let _ = write!(out, " {:.1} | {:.2} | {} |", p.published, p.estimated, format_error(p));
        }
        out.push('\n');
    }
    let all: Vec<Pair> = layers.iter().flat_map(|l| [l.forward, l.backward]).collect();
    write_errors(out, "All ten", &all);
}

fn memory(out: &mut String, trained: &[TrainingRun]) {
    out.push_str(
        "
## Memory

The same paper, figure 1, GiB on a rank of the first stage. *State* is weights, gradients and optimizer, 18 bytes per parameter. Only
layers are compared, as in the published numbers; a budget also counts embedding and head.

| model | state | estimated | error | activations | estimated | error | selective | estimated | error |
| --- | --- | --- | --- | --- | --- | --- | --- | --- | --- |
",
    );
    for t in trained {
        let _ = write!(out, "| {} |", t.model);
        for p in [&t.state, &t.activations[0], &t.activations[1]] {
            let _ = write!(out, " {:.2} | {:.2} | {} |", p.published, p.estimated, format_error(p));
        }
        out.push('\n');
    }
    write_errors(out, "State", &trained.iter().map(|t| t.state).collect::<Vec<_>>());
    write_errors(out, "Activations", &trained.iter().flat_map(|t| t.activations).collect::<Vec<_>>());
    out.push_str(
        "
Figure 7, activations in per cent of tensor parallelism alone: published / estimated.

| model | sequence parallel | attention recomputed | both | full recomputation |
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
    write_errors(
        out,
        "All sixteen, relative to the percentage",
        &trained.iter().flat_map(|t| t.shares).collect::<Vec<_>>(),
    );
}

fn scaling(out: &mut String, now: &ScalingTable, limited: &[(&str, ScalingTable)]) {
    let _ = write!(
        out,
        "
## Scaling

Narayanan et al. 2021, TFLOP/s per device, counting recomputation as the paper does. The source gives neither micro-batch nor
interleaving: the planner chose the fastest that fit (micro-batches 1 to 16; any number of model chunks that divides a stage's
layers). One scalar for all rows, {:.3}, is the only number fitted here.

| model | devices | mapping | micro-batch | chunks | published | estimated | error |
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
            r.layout,
            r.micro_batch,
            r.interleave,
            p.published,
            p.estimated,
            format_error(&p)
        );
    }
    write_errors(out, "All ten", &now.rates());
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
        let (mean, _) = mean_and_max_error(&s.rates());
        let _ = writeln!(
            out,
            "| {name} | {:.3} | {:.1} % | {:.2} |",
            s.scalar,
            100.0 * mean,
            s.rank_correlation()
        );
    }
}

fn format_error(p: &Pair) -> String {
    format!("{:+.1} %", 100.0 * p.error())
}

fn write_errors(out: &mut String, what: &str, pairs: &[Pair]) {
    let (mean, most) = mean_and_max_error(pairs);
    let _ = write!(out, "\n{what}: mean error {:.2} %, largest {:.2} %.\n", 100.0 * mean, 100.0 * most);
}
