//! The LoRAs that clients may choose.

use tessera::shards::preflight_reload;
use tessera::{LoraFile, WeightChange};
use tessera_base::{Diagnostic, Diagnostics};

use crate::ServedStream;
use crate::codes::{T1609, T1616};

/// Names of LoRAs with the weights that each stands for.
#[derive(Debug, Default)]
pub(crate) struct LoraTable {
    choices: Vec<(String, WeightChange)>,
}

impl LoraTable {
    /// Reads every file once, so that a choice that cannot work ends the server before it starts.
    ///
    /// # Errors
    /// T1609 for a name that two LoRAs have, or what is wrong with a file.
    pub(crate) fn open(stream: &ServedStream) -> Result<LoraTable, Diagnostics> {
        let mut table = LoraTable::default();
        for choice in &stream.loras {
            if table.choices.iter().any(|(name, _)| *name == choice.name) {
                let message = format!("two LoRAs have the name `{}`", choice.name);
                return Err(vec![Diagnostic::error(&T1609, message).with_hint("rename one of them")]);
            }
            let change = WeightChange::Loras(vec![choice.file.clone()]);
            preflight_reload(&stream.plan, &stream.model, &change)?;
            // A record states absolute paths, too.
            let change = change.to_absolute().map_err(|e| {
                let LoraFile { path, .. } = &choice.file;
                vec![Diagnostic::error(&T1609, format!("{}: {e}", path.display()))]
            })?;
            table.choices.push((choice.name.clone(), change));
        }
        Ok(table)
    }

    /// Returns the weights with a LoRA, or those without any.
    ///
    /// # Errors
    /// T1616 for a name that no LoRA has.
    pub(crate) fn find(&self, name: Option<&str>) -> Result<WeightChange, Diagnostic> {
        let Some(name) = name else { return Ok(WeightChange::Loras(Vec::new())) };
        let found = self.choices.iter().find(|(known, _)| known == name).map(|(_, change)| change.clone());
        found.ok_or_else(|| {
            let known: Vec<&str> = self.choices.iter().map(|(name, _)| name.as_str()).collect();
            Diagnostic::error(&T1616, format!("the server has no LoRA `{name}`")).with_hint(match known[..] {
                [] => "start the server with --lora NAME=FILE".to_string(),
                _ => format!("choose one of {}, or null for none", known.join(", ")),
            })
        })
    }

    /// Returns the name of weights as a record states them; `None` without a LoRA.
    pub(crate) fn name_of(&self, source: &str) -> Option<String> {
        let change = WeightChange::parse(source);
        let known = self.choices.iter().find(|(_, choice)| *choice == change).map(|(name, _)| name.clone());
        // A session that is continued may have had other names.
        known.or_else(|| (change != WeightChange::Loras(Vec::new())).then(|| source.to_string()))
    }
}
