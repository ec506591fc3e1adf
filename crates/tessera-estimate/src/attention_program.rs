//! The attention program of a plan by estimate. The estimate itself only prices op rows; the
//! rs_mm_ag scheme also has a verified program of one layer's attention.

use tessera_base::{Diagnostic, Diagnostics};
use tessera_cost::params::TpScheme;
use tessera_ir::analytic_model::LayerOpKind;
use tessera_ir::{DType, print};
use tessera_plan::attention::{AttentionShape, QLayout, rs_mm_ag};
use tessera_plan::search::{RankedCandidate, SearchQuery};
use tessera_verify::{DeviceLimits, seal};

use crate::report::EstimateReport;

/// File name of the program in a plan's folder.
pub(crate) const ATTENTION_FILE: &str = "attention.tir";

/// Adds the attention program of an rs_mm_ag mapping to its report, or the reason why it has none.
/// Other schemes have no program here.
pub(crate) fn attach_program(sheet: &mut EstimateReport, q: &SearchQuery, best: &RankedCandidate) {
    if best.candidate.layout.scheme != TpScheme::RsMmAg {
        return;
    }
    let Some((shape, expanded)) = attention_shape(q, best) else { return };
    match render_program(&shape, expanded, q.machine.cluster.device.memory_bytes.value as u64) {
        Ok(text) => {
            sheet.page.accuracy_notes.push(format!(
                "With --out, {ATTENTION_FILE} contains the verified program of one layer's attention on one tp group: \
                 every rank writes {} of partial scores before the reduce-scatter over heads.",
                shape.scores_bytes()
            ));
            sheet.attention_program = Some(text);
        }
        Err(ds) => {
            let why: Vec<String> = ds.iter().map(format_diagnostic).collect();
            sheet.page.accuracy_notes.push(format!("{ATTENTION_FILE} is not written: {}", why.join("; ")));
        }
    }
}

/// Returns the attention shape of the first layer that has attention, and whether its keys and
/// values are expanded from a latent.
fn attention_shape(q: &SearchQuery, best: &RankedCandidate) -> Option<(AttentionShape, bool)> {
    let rows = q.work.stacks.iter().flat_map(|s| &s.ops);
    rows.map(|r| r.kind).find_map(|op| match op {
        LayerOpKind::Attention { heads, kv_heads, qk, v, causal, latent, .. } => {
            let shape = AttentionShape {
                heads,
                kv_heads,
                qk_dim: qk,
                v_dim: v,
                sequences: best.candidate.micro_batch.into(),
                queries: q.job.query_tokens(),
                keys: q.job.context_tokens(),
                causal,
                // Scores are priced at two bytes whatever the precision of the matmuls.
                dtype: DType::Bf16,
                tp: best.candidate.layout.tp,
            };
            Some((shape, latent.is_some()))
        }
        _ => None,
    })
}

fn render_program(s: &AttentionShape, expanded: bool, device_bytes: u64) -> Result<String, Diagnostics> {
    let bundle = rs_mm_ag(s, QLayout::Replicated)?;
    let programs: Vec<String> = bundle.phases.iter().flat_map(|p| &p.programs).map(print).collect();
    seal(bundle, &DeviceLimits { device_bytes: Some(device_bytes), ..DeviceLimits::default() })?;
    let mut out = format!(
        "// One layer's attention by rs_mm_ag on tp={}: {} query heads, {} KV heads, head dimensions {} (QK) and {} (V), {} keys.\n\
         // Dims: head groups, sequences of a micro-batch, queries of the heads of a group, columns.\n\
         // Partial scores of each rank before the reduce-scatter over heads: {}.\n",
        s.tp,
        s.heads,
        s.kv_heads,
        s.qk_dim,
        s.v_dim,
        s.keys,
        s.scores_bytes()
    );
    let stacks = s.kv_stacks().unwrap_or(s.kv_heads);
    if stacks > s.kv_heads {
        out += &format!("// Each KV head is repeated {} times.\n", stacks / s.kv_heads.max(1));
    }
    if expanded {
        out += "// Keys and values are already expanded from the cached latent.\n";
    }
    Ok(out + &programs.join("\n"))
}

fn format_diagnostic(d: &Diagnostic) -> String {
    let hint = d.hint.as_ref().map_or(String::new(), |h| format!(" ({h})"));
    format!("{} ({}), {}{hint}", d.message, d.code.id, d.code.title)
}

#[cfg(test)]
mod tests {
    use super::*;
    use tessera_plan::search::thresholds::Thresholds;
    use tessera_plan::search::{Job, Pins};

    use crate::language::search_language;
    use crate::machine::load_machine;
    use crate::query::{LanguageQuery, ModelSource};
    use tessera::check::{check_file, check_text};

    const S: AttentionShape = AttentionShape {
        heads: 32,
        kv_heads: 8,
        qk_dim: 128,
        v_dim: 128,
        sequences: 4,
        queries: 1,
        keys: 4097,
        causal: true,
        dtype: DType::Bf16,
        tp: 8,
    };

    fn plan_llama(job: Job) -> EstimateReport {
        let asked = LanguageQuery {
            model_source: ModelSource::Zoo("llama-3.1-8b".to_string()),
            machine: load_machine("hgx-h200", None, None).unwrap_or_else(|ds| panic!("{ds:#?}")),
            devices: None,
            job: Some(job),
            objective: None,
            pins: Pins::parse("scheme=rs_mm_ag,tp=8,micro_batch=1").unwrap_or_else(|ds| panic!("{ds:#?}")),
            routing: None,
            prefetch_hit_rate: None,
            strict: false,
            limits: Thresholds::default(),
            command: String::new(),
        };
        search_language(&asked).unwrap_or_else(|ds| panic!("{ds:#?}"))
    }

    #[test]
    fn rs_mm_ag_plan_writes_its_attention_or_the_reason() {
        let sheet = plan_llama(Job::Decode { batch: 8, context: 4096 });
        let dir = tempfile::tempdir().unwrap_or_else(|e| panic!("{e}"));
        sheet.write(&dir.path().join("plan")).unwrap_or_else(|d| panic!("{d:#?}"));
        let checked = check_file(&dir.path().join("plan").join(ATTENTION_FILE), &DeviceLimits::default());
        assert!(checked.is_verified() && checked.programs == 1, "{:#?}", checked.diagnostics);
        let scores = AttentionShape { sequences: 1, ..S }.scores_bytes().to_string();
        assert!(sheet.to_text().contains(&scores), "{}", sheet.to_text());

        let prompts = plan_llama(Job::Prefill { batch: 8, sequence: 512 });
        assert!(
            prompts.is_feasible()
                && prompts.attention_program.is_none()
                && prompts.to_text().contains("T0608")
        );
        let long = plan_llama(Job::Prefill { batch: 8, sequence: 131_072 });
        assert!(!long.is_feasible() && long.attention_program.is_none() && long.to_text().contains("T1209"));
    }

    #[test]
    fn written_program_passes_check() {
        for tp in [2, 8, 16] {
            let s = AttentionShape { tp, ..S };
            let text = render_program(&s, false, 141 << 30).unwrap_or_else(|ds| panic!("{ds:#?}"));
            let checked = check_text(text.clone(), ATTENTION_FILE, &DeviceLimits::default());
            assert!(
                checked.is_verified() && checked.diagnostics.is_empty(),
                "{:#?}\n{text}",
                checked.diagnostics
            );
            assert!(text.contains(&s.scores_bytes().to_string()));
            assert_eq!(text.contains("repeated 2 times"), tp == 16);
        }
    }

    #[test]
    fn invalid_shapes_are_reported() {
        let refused = |s, bytes| render_program(&s, false, bytes).err().unwrap_or_default();
        let uneven = refused(AttentionShape { tp: 5, ..S }, 141 << 30);
        assert!(
            format_diagnostic(&uneven[0]).contains("T0607")
                && format_diagnostic(&uneven[0]).contains("tp = 2, 4, 8, 16 or 32")
        );
        assert!(!refused(S, 1 << 20).is_empty(), "a device of one MiB");
    }
}
