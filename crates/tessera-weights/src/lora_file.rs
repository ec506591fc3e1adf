//! Reads a LoRA from a safetensors file, in the names of several tools.

use std::collections::BTreeMap;
use std::path::Path;

use tessera_base::{Diagnostic, Diagnostics, closest_name};

use crate::codes::T0514;
use crate::lora::{Lora, LowRankUpdate};
use crate::{ExpectedTensor, WeightFiles, WeightSet};

/// The ends of the names of both factors, down first: PEFT and diffusers, PEFT with an adapter's name,
/// kohya.
const FACTOR_SUFFIXES: [[&str; 2]; 4] = [
    [".lora_A.weight", ".lora_B.weight"],
    [".lora_A.default.weight", ".lora_B.default.weight"],
    [".lora_down.weight", ".lora_up.weight"],
    [".lora.down.weight", ".lora.up.weight"],
];

/// What may precede the name of a generator's module, in the order in which it is removed.
const PREFIXES: [&str; 6] =
    ["base_model.model.", "model.", "diffusion_model.", "transformer.", "lora_unet_", "lora_transformer_"];

/// Maximum differences that a diagnostic lists.
const LISTED_MAX: usize = 8;

impl Lora {
    /// Opens a LoRA for a model with these tensors, and scales it by `strength`.
    ///
    /// # Errors
    /// Why the file cannot be read, or T0514 with every tensor that the model cannot take.
    pub fn open(path: &Path, expected: &[ExpectedTensor], strength: f32) -> Result<Lora, Diagnostics> {
        let set = WeightFiles::open_file(path).map_err(|d| vec![d])?.resolve_as_is()?;
        let modules = ModuleNames::new(expected);
        let mut lora = Lora::default();
        let mut problems = Vec::new();
        for name in set.tensor_names() {
            match FactorName::parse(name) {
                FactorName::Down { module, up } => {
                    match read_update(&set, &modules, module, [name, &up], strength) {
                        Ok((target, update)) => drop(lora.updates.insert(target, update)),
                        Err(problem) => problems.push(problem),
                    }
                }
                FactorName::Up { down } if set.tensor_shape(&down).is_some() => {}
                FactorName::Alpha => {}
                FactorName::Up { down } => problems.push(format!("{name}: the file has no {down}")),
                FactorName::Other => {
                    problems.push(format!(
                        "{name}: neither a factor lora_A, lora_B, lora_down or lora_up nor an alpha"
                    ));
                }
            }
        }
        if problems.is_empty() && lora.updates.is_empty() {
            problems.push("the file has no low-rank factors".into());
        }
        if !problems.is_empty() {
            return Err(vec![describe_problems(path, problems)]);
        }
        let mut hash = blake3::Hasher::new_derive_key("tessera low-rank update 1");
        hash.update(&set.content_digest(1)).update(&strength.to_bits().to_le_bytes());
        lora.digest = *hash.finalize().as_bytes();
        Ok(lora)
    }
}

/// The part of a LoRA that a tensor's name says it is.
enum FactorName<'a> {
    Down { module: &'a str, up: String },
    Up { down: String },
    Alpha,
    Other,
}

impl FactorName<'_> {
    fn parse(name: &str) -> FactorName<'_> {
        for [down, up] in FACTOR_SUFFIXES {
            if let Some(module) = name.strip_suffix(down) {
                return FactorName::Down { module, up: format!("{module}{up}") };
            }
            if let Some(module) = name.strip_suffix(up) {
                return FactorName::Up { down: format!("{module}{down}") };
            }
        }
        if name.ends_with(".alpha") { FactorName::Alpha } else { FactorName::Other }
    }
}

/// The matrices of a model by the name of their module, in which dots and underscores are one.
struct ModuleNames<'a>(BTreeMap<String, &'a ExpectedTensor>);

impl<'a> ModuleNames<'a> {
    fn new(expected: &'a [ExpectedTensor]) -> ModuleNames<'a> {
        let names = |t: &'a ExpectedTensor| t.aliases.iter().chain([&t.name]).map(move |n| (n, t));
        let modules = expected.iter().filter(|t| t.shape.len() == 2).flat_map(names);
        ModuleNames(
            modules.filter_map(|(n, t)| Some((n.strip_suffix(".weight")?.replace('.', "_"), t))).collect(),
        )
    }

    fn find(&self, module: &str) -> Result<&'a ExpectedTensor, String> {
        let mut bare = module;
        for prefix in PREFIXES {
            bare = bare.strip_prefix(prefix).unwrap_or(bare);
        }
        let bare = bare.replace('.', "_");
        self.0.get(&bare).copied().ok_or_else(|| {
            let near = closest_name(&bare, self.0.keys().map(String::as_str));
            let near =
                near.and_then(|n| self.0.get(n)).map_or(String::new(), |t| format!("; similar: {}", t.name));
            format!("{module}: the generator has no such matrix{near}")
        })
    }
}

fn read_update(
    set: &WeightSet,
    modules: &ModuleNames<'_>,
    module: &str,
    [down, up]: [&str; 2],
    strength: f32,
) -> Result<(String, LowRankUpdate), String> {
    let target = modules.find(module)?;
    let [m, k] = target.shape[..] else { return Err(format!("{module}: not a matrix")) };
    let rank = match (set.tensor_shape(down), set.tensor_shape(up)) {
        (Some([r, k2]), Some([m2, r2])) if *k2 == k && *m2 == m && r == r2 && *r > 0 => *r,
        (found_down, found_up) => {
            return Err(format!(
                "{module}: {} is [{m}, {k}], so the factors must be [r, {k}] and [{m}, r], not {} and {}",
                target.name,
                describe_shape(found_down),
                describe_shape(found_up)
            ));
        }
    };
    let read = |name: &str| set.read_whole_f32(name).map_err(|d| d.message);
    let alpha_name = format!("{module}.alpha");
    let alpha = match set.tensor_shape(&alpha_name) {
        Some(_) => read(&alpha_name)?.first().copied().unwrap_or(rank as f32),
        None => rank as f32,
    };
    let scale = strength * alpha / rank as f32;
    let update = LowRankUpdate { down: read(down)?, up: read(up)?, rank: rank as usize, scale };
    let finite = update.down.iter().chain(&update.up).all(|x| x.is_finite()) && scale.is_finite();
    if finite { Ok((target.name.clone(), update)) } else { Err(format!("{module}: a factor is not finite")) }
}

fn describe_shape(shape: Option<&[u64]>) -> String {
    shape.map_or("absent".into(), |s| format!("{s:?}"))
}

fn describe_problems(path: &Path, mut problems: Vec<String>) -> Diagnostic {
    let count = problems.len();
    problems.truncate(LISTED_MAX);
    let mut d = Diagnostic::error(&T0514, format!("the LoRA does not fit the model: {count} problems"))
        .with_label(path.display().to_string(), "this LoRA")
        .with_hint("use a LoRA that was trained for this generator, without changes of other kinds");
    if count > LISTED_MAX {
        problems.push(format!("{} more", count - LISTED_MAX));
    }
    d.notes = problems;
    d
}
