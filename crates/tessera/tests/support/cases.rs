//! The cases of `expected.safetensors` of a fixture, as scripts.

use tessera::{Model, Plan};
use tessera_device::Scalar;
use tessera_weights::WeightSet;

use super::{ScriptStep, run_script, tokens};

fn per_frame_scalar(set: &WeightSet, name: &str) -> Scalar {
    let t = set.read_whole_f32(name).unwrap();
    Scalar::F32s(if t.len() == 1 { vec![t[0]; 3] } else { t })
}

/// Builds one denoising forward over x; it emits x − flow, because sigma is 1.
pub fn denoise(
    m: &Model,
    set: &WeightSet,
    case: &str,
    fill: u64,
    start: i64,
    row: i64,
    bias: Option<f32>,
) -> Vec<ScriptStep> {
    let rows = m.video.frame_tokens() as i64;
    let mut scalars = vec![
        ("t", per_frame_scalar(set, &format!("{case}.t"))),
        ("sigma", Scalar::F32(1.0)),
        ("start", Scalar::I64(start)),
        ("row", Scalar::I64(row * rows)),
    ];
    scalars.extend(bias.map(|b| ("bias", Scalar::F32(b.ln()))));
    vec![
        ScriptStep::Set("x", tokens(set, &format!("{case}.x"))),
        ScriptStep::Phase { name: format!("denoise.fill{fill}"), scalars, inputs: vec![] },
        ScriptStep::Emit,
    ]
}

pub fn clean_pass(
    m: &Model,
    set: &WeightSet,
    chunk: &str,
    fill: u64,
    start: i64,
    row: i64,
) -> Vec<ScriptStep> {
    let rows = m.video.frame_tokens() as i64;
    let scalars = vec![
        ("t", Scalar::F32s(vec![0.0; 3])),
        ("start", Scalar::I64(start)),
        ("row", Scalar::I64(row * rows)),
    ];
    vec![
        ScriptStep::Set("latent", tokens(set, &format!("{chunk}.clean.x"))),
        ScriptStep::Phase { name: format!("clean.fill{fill}"), scalars, inputs: vec![] },
    ]
}

/// Builds every case of a fixture in one regime: the script and the case name of each emit.
fn list_cases(m: &Model, set: &WeightSet, recompute: bool) -> (Vec<ScriptStep>, Vec<String>) {
    let mut script = Vec::new();
    let mut names: Vec<String> = Vec::new();
    let has = |n: &str| set.tensor_shape(n).is_some();
    if recompute {
        for (chunk, bias) in [("rec.c1", 1.0f32), ("rec.c2", 1.0), ("rec.b", 0.3)] {
            let scalars =
                vec![("t", Scalar::F32s(vec![0.0; 3])), ("start", Scalar::I64(0)), ("row", Scalar::I64(0))];
            let context = tokens(set, &format!("{chunk}.context"));
            script.push(ScriptStep::Phase {
                name: "recompute".into(),
                scalars,
                inputs: vec![("context", context)],
            });
            for s in (0..).take_while(|s| has(&format!("{chunk}.s{s}.x"))) {
                let case = format!("{chunk}.s{s}");
                script.extend(denoise(m, set, &case, 3, 3, 3, Some(bias)));
                names.push(case);
            }
        }
    } else {
        script.extend(denoise(m, set, "full", 0, 0, 0, None));
        names.push("full".into());
        for (prefix, base) in [("res", 0), ("deep", 897)] {
            for c in (0..).take_while(|c| has(&format!("{prefix}.c{c}.s0.x"))) {
                let chunk = format!("{prefix}.c{c}");
                let (fill, start, row) = (if c == 0 { 0 } else { 3 }, base + 3 * c, 3 * (c % 2));
                for s in (0..).take_while(|s| has(&format!("{chunk}.s{s}.x"))) {
                    let case = format!("{chunk}.s{s}");
                    script.extend(denoise(m, set, &case, fill, start, row, None));
                    names.push(case);
                }
                if has(&format!("{chunk}.clean.x")) {
                    script.extend(clean_pass(m, set, &chunk, fill, start, row));
                }
            }
        }
    }
    (script, names)
}

/// Runs every case of a fixture in one regime after the phase `text`, and returns their names and flows.
pub fn run_cases(
    m: &Model,
    set: &WeightSet,
    recompute: bool,
    p: &Plan,
    text: ScriptStep,
) -> Vec<(String, Vec<f32>)> {
    let (mut script, names) = list_cases(m, set, recompute);
    script.insert(0, text);
    let out = run_script(m, p, &script);
    assert_eq!(out.len(), names.len());
    names
        .into_iter()
        .zip(out)
        .map(|(name, x0)| {
            let x = tokens(set, &format!("{name}.x"));
            let flow = x.iter().zip(&x0).map(|(x, x0)| x - x0).collect();
            (name, flow)
        })
        .collect()
}
