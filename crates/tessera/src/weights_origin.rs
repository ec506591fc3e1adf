//! Where the weights of a model come from: its files or a seed, and the LoRAs that are added to them.

use std::fmt;
use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};
use tessera_base::Diagnostic;

use crate::codes::T0018;

/// Where the weights of a model come from.
#[derive(Debug, Clone, PartialEq, Default, Serialize, Deserialize)]
pub struct WeightsOrigin {
    /// The weights before any LoRA.
    pub base: WeightsBase,
    /// LoRAs of the generator, added in this order.
    pub loras: Vec<LoraFile>,
}

/// The weights of a model before any LoRA.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
pub enum WeightsBase {
    /// The files of the model's folder.
    #[default]
    Files,
    /// Values that are computed from this seed, without files.
    Synthetic(u64),
}

/// A LoRA file and its strength, which multiplies its whole update.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct LoraFile {
    /// Path of the file.
    pub path: PathBuf,
    /// Factor of the update; 1 adds it as it was trained.
    pub strength: f32,
}

/// New weights that every rank loads before a chunk.
#[derive(Debug, Clone, PartialEq)]
pub enum WeightChange {
    /// The weights of another model folder.
    Folder(PathBuf),
    /// The first weights of the stream with these LoRAs in place of any others.
    Loras(Vec<LoraFile>),
}

/// What a change to LoRAs begins with as text. No folder is called so.
const LORAS: &str = "lora:";

impl WeightsBase {
    /// Parses `synthetic:SEED`.
    #[must_use]
    pub fn parse(text: &str) -> Option<WeightsBase> {
        text.strip_prefix("synthetic:")?.parse().ok().map(WeightsBase::Synthetic)
    }
}

impl LoraFile {
    /// Parses `FILE` or `FILE:STRENGTH`; the part behind the last colon is a strength if it is a number.
    ///
    /// # Errors
    /// Why the text names no LoRA.
    pub fn parse(text: &str) -> Result<LoraFile, &'static str> {
        let (path, strength) = match text.rsplit_once(':') {
            Some((path, number)) if !number.is_empty() => match number.parse::<f32>() {
                Ok(strength) => (path, strength),
                Err(_) => (text, 1.0),
            },
            _ => (text, 1.0),
        };
        if path.is_empty() {
            return Err("no file before the strength");
        }
        if !strength.is_finite() || strength == 0.0 {
            return Err("the strength is not a number other than 0");
        }
        Ok(LoraFile { path: PathBuf::from(path), strength })
    }

    /// Returns the same LoRA with an absolute path.
    ///
    /// # Errors
    /// Why the path has no absolute form.
    pub(crate) fn to_absolute(&self) -> std::io::Result<LoraFile> {
        Ok(LoraFile { path: std::path::absolute(&self.path)?, ..*self })
    }
}

impl WeightChange {
    /// Parses the text that `Display` writes.
    #[must_use]
    pub fn parse(text: &str) -> WeightChange {
        match text.strip_prefix(LORAS).map(serde_json::from_str) {
            Some(Ok(loras)) => WeightChange::Loras(loras),
            _ => WeightChange::Folder(PathBuf::from(text)),
        }
    }

    /// Returns the same change with absolute paths.
    ///
    /// # Errors
    /// Why a path has no absolute form.
    pub fn to_absolute(&self) -> std::io::Result<WeightChange> {
        Ok(match self {
            WeightChange::Folder(folder) => WeightChange::Folder(std::path::absolute(folder)?),
            WeightChange::Loras(loras) => {
                WeightChange::Loras(loras.iter().map(LoraFile::to_absolute).collect::<Result<_, _>>()?)
            }
        })
    }

    /// Checks that a stream whose weights came from `base` can change to these.
    ///
    /// # Errors
    /// T0018 for files of weights after synthetic ones.
    pub(crate) fn check_base(&self, base: WeightsBase) -> Result<(), Diagnostic> {
        match (base, self) {
            (WeightsBase::Files, _) | (_, WeightChange::Loras(_)) => Ok(()),
            (_, WeightChange::Folder(_)) => {
                Err(Diagnostic::error(&T0018, "a stream of synthetic weights cannot load weight files later")
                    .with_hint("leave the change out, or stream from the files of the model"))
            }
        }
    }

    /// Returns the folder and the origin of the changed weights, for a stream that began with others.
    pub(crate) fn apply_to<'a>(
        &'a self,
        folder: &'a Path,
        origin: &WeightsOrigin,
    ) -> (&'a Path, WeightsOrigin) {
        match self {
            WeightChange::Folder(other) => (other, WeightsOrigin::default()),
            WeightChange::Loras(loras) => (folder, WeightsOrigin { base: origin.base, loras: loras.clone() }),
        }
    }
}

impl fmt::Display for WeightChange {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            WeightChange::Folder(folder) => folder.display().fmt(f),
            WeightChange::Loras(loras) => {
                write!(f, "{LORAS}{}", serde_json::to_string(loras).map_err(|_| fmt::Error)?)
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_lora_may_state_its_strength() {
        let parse = |text: &str| LoraFile::parse(text).map(|l| (l.path.display().to_string(), l.strength));
        assert_eq!(parse("a/b.safetensors"), Ok(("a/b.safetensors".into(), 1.0)));
        assert_eq!(parse("b.safetensors:-0.5"), Ok(("b.safetensors".into(), -0.5)));
        assert_eq!(parse("c:/x:y.safetensors"), Ok(("c:/x:y.safetensors".into(), 1.0)));
        for bad in [":0.5", "b.safetensors:0", "b.safetensors:nan", "b.safetensors:inf"] {
            assert!(parse(bad).is_err(), "{bad}");
        }
    }

    #[test]
    fn a_change_survives_its_text() {
        let lora = |path: &str, strength| LoraFile { path: path.into(), strength };
        for change in [
            WeightChange::Folder("/models/other".into()),
            WeightChange::Loras(vec![]),
            WeightChange::Loras(vec![lora("/a:b \"c\".safetensors", 0.1), lora("/d", -2.0)]),
        ] {
            assert_eq!(WeightChange::parse(&change.to_string()), change);
        }
    }
}
