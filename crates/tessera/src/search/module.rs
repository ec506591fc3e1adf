//! The program of what rows only price: one layer's attention of a plan by estimate, where its scheme has one.

use tessera_base::{Diagnostic, Diagnostics};
use tessera_cost::knobs::Scheme;
use tessera_ir::work::RowOp;
use tessera_ir::{DType, print};
use tessera_plan::attention::{AttentionShape, QLayout, rs_mm_ag};
use tessera_plan::search::{Question, Ranked};
use tessera_verify::{Limits, seal};

use super::Sheet;

/// Its file in a plan's folder.
pub(super) const FILE: &str = "attention.tir";

/// Adds the attention of a mapping by rs_mm_ag to its sheet, or why it has none. Other schemes have no program here.
pub(super) fn add(sheet: &mut Sheet, q: &Question, best: &Ranked) {
    if best.candidate.layout.scheme != Scheme::RsMmAg {
        return;
    }
    let Some((shape, expanded)) = shape(q, best) else { return };
    match text(&shape, expanded, q.machine.cluster.device.memory_bytes.value as u64) {
        Ok(text) => {
            sheet.page.sources.push(format!(
                "With --out, {FILE} is the program of one layer's attention on one group of tp, as the judge passed it: \
                 every rank writes {} of partial scores before they are scattered over heads.",
                shape.scores_bytes()
            ));
            sheet.module = Some(text);
        }
        Err(ds) => {
            let why: Vec<String> = ds.iter().map(says).collect();
            sheet.page.sources.push(format!("There is no {FILE}: {}", why.join("; ")));
        }
    }
}

/// The attention of the first layer that has any, and whether its keys and values come out of a latent.
fn shape(q: &Question, best: &Ranked) -> Option<(AttentionShape, bool)> {
    let rows = q.work.stacks.iter().flat_map(|s| &s.rows);
    rows.map(|r| r.op).find_map(|op| match op {
        RowOp::Attention { heads, kv_heads, qk, v, causal, latent, .. } => {
            let shape = AttentionShape {
                heads,
                kv_heads,
                qk,
                v,
                sequences: best.candidate.micro_batch.into(),
                tokens: q.job.queries(),
                keys: q.job.context(),
                causal,
                // Scores are priced at two bytes whatever the precision of products.
                dtype: DType::Bf16,
                tp: best.candidate.layout.tp,
            };
            Some((shape, latent.is_some()))
        }
        _ => None,
    })
}

fn text(s: &AttentionShape, expanded: bool, device_bytes: u64) -> Result<String, Diagnostics> {
    let bundle = rs_mm_ag(s, QLayout::Replicated)?;
    let programs: Vec<String> = bundle.phases.iter().flat_map(|p| &p.programs).map(print).collect();
    seal(bundle, &Limits { device_bytes: Some(device_bytes), ..Limits::default() })?;
    let mut out = format!(
        "// One layer's attention by rs_mm_ag on tp={}: {} heads over {} of keys and values, features {} and {}, {} keys.\n\
         // Dims: stacks of heads, sequences of a micro-batch, queries of the heads of a stack, columns.\n\
         // Partial scores of each rank before they are scattered over heads: {}.\n",
        s.tp,
        s.heads,
        s.kv_heads,
        s.qk,
        s.v,
        s.keys,
        s.scores_bytes()
    );
    let stacks = s.stacks().unwrap_or(s.kv_heads);
    if stacks > s.kv_heads {
        out += &format!("// Each head of keys and values stands {} times.\n", stacks / s.kv_heads.max(1));
    }
    if expanded {
        out += "// Keys and values as they come out of the latent in the cache.\n";
    }
    Ok(out + &programs.join("\n"))
}

fn says(d: &Diagnostic) -> String {
    let hint = d.hint.as_ref().map_or(String::new(), |h| format!(" ({h})"));
    format!("{} ({}), {}{hint}", d.message, d.code.id, d.code.title)
}

#[cfg(test)]
mod tests {
    use super::*;
    use tessera_plan::search::thresholds::Thresholds;

    use super::super::{Asked, Job, Subject, machine, row_pins, rows};
    use crate::check::{check_file, check_text};

    const S: AttentionShape = AttentionShape {
        heads: 32,
        kv_heads: 8,
        qk: 128,
        v: 128,
        sequences: 4,
        tokens: 1,
        keys: 4097,
        causal: true,
        dtype: DType::Bf16,
        tp: 8,
    };

    fn planned(job: Job) -> Sheet {
        let asked = Asked {
            subject: Subject::Zoo("llama-3.1-8b".to_string()),
            machine: machine("hgx-h200", None, None).unwrap_or_else(|ds| panic!("{ds:#?}")),
            devices: None,
            job: Some(job),
            objective: None,
            pins: row_pins("scheme=rs_mm_ag,tp=8,micro_batch=1").unwrap_or_else(|ds| panic!("{ds:#?}")),
            routing: None,
            forecast: None,
            strict: false,
            limits: Thresholds::default(),
            command: String::new(),
        };
        rows(&asked).unwrap_or_else(|ds| panic!("{ds:#?}"))
    }

    #[test]
    fn a_plan_by_this_scheme_writes_its_attention_or_says_why_not() {
        let sheet = planned(Job::Decode { batch: 8, context: 4096 });
        let dir = tempfile::tempdir().unwrap_or_else(|e| panic!("{e}"));
        sheet.write(&dir.path().join("plan")).unwrap_or_else(|d| panic!("{d:#?}"));
        let checked = check_file(&dir.path().join("plan").join(FILE), &Limits::default());
        assert!(checked.verified() && checked.programs == 1, "{:#?}", checked.diagnostics);
        let scores = AttentionShape { sequences: 1, ..S }.scores_bytes().to_string();
        assert!(sheet.text().contains(&scores), "{}", sheet.text());

        let prompts = planned(Job::Prefill { batch: 8, sequence: 512 });
        assert!(prompts.fits() && prompts.module.is_none() && prompts.text().contains("T0608"));
        let long = planned(Job::Prefill { batch: 8, sequence: 131_072 });
        assert!(!long.fits() && long.module.is_none() && long.text().contains("T1209"));
    }

    #[test]
    fn what_is_written_can_be_checked() {
        for tp in [2, 8, 16] {
            let s = AttentionShape { tp, ..S };
            let text = text(&s, false, 141 << 30).unwrap_or_else(|ds| panic!("{ds:#?}"));
            let checked = check_text(text.clone(), FILE, &Limits::default());
            assert!(
                checked.verified() && checked.diagnostics.is_empty(),
                "{:#?}\n{text}",
                checked.diagnostics
            );
            assert!(text.contains(&s.scores_bytes().to_string()));
            assert_eq!(text.contains("stands 2 times"), tp == 16);
        }
    }

    #[test]
    fn what_does_not_fit_is_said() {
        let refused = |s, bytes| text(&s, false, bytes).err().unwrap_or_default();
        let uneven = refused(AttentionShape { tp: 5, ..S }, 141 << 30);
        assert!(says(&uneven[0]).contains("T0607") && says(&uneven[0]).contains("tp = 2, 4, 8, 16 or 32"));
        assert!(!refused(S, 1 << 20).is_empty(), "a device of one MiB");
    }
}
