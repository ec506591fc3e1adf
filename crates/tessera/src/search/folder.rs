//! The folder of a plan by estimate.

use std::path::Path;

use tessera_base::Diagnostic;
use tessera_report::mermaid::gantt;
use tessera_report::perfetto::trace;
use tessera_report::timeline::Window;

use super::{Sheet, module, ranks};
use crate::files::Folder;
use crate::plan::Plan;

impl Sheet {
    /// Writes the page, the numbers, the timeline as a trace and as a chart, who sits where, and the environment. The folder appears
    /// whole or not at all.
    ///
    /// # Errors
    /// When the folder exists or cannot be written.
    pub fn write(&self, dir: &Path) -> Result<(), Diagnostic> {
        let mut folder = Folder::create(dir)?;
        self.write_into(&mut folder)?;
        folder.finish()
    }

    /// Writes the folder of a sealed plan with the estimate beside it.
    ///
    /// # Errors
    /// When the folder exists or cannot be written.
    pub fn write_with(&self, plan: &Plan, dir: &Path) -> Result<(), Diagnostic> {
        let mut folder = Folder::create(dir)?;
        plan.write_into(&mut folder, "")?;
        self.write_into(&mut folder)?;
        folder.finish()
    }

    fn write_into(&self, folder: &mut Folder) -> Result<(), Diagnostic> {
        folder.write("report.html", self.html().as_bytes())?;
        let json = serde_json::to_string_pretty(&self.json).unwrap_or_default() + "\n";
        folder.write("estimate.json", json.as_bytes())?;
        if !self.timeline.spans.is_empty() {
            folder.write("timeline.json", trace(&self.timeline).as_bytes())?;
            let whole = Window { start_ns: 0, end_ns: u64::MAX };
            folder.write("timeline.mmd", gantt(&self.timeline, whole).as_bytes())?;
        }
        if let Some(text) = &self.ranks {
            folder.write(ranks::FILE, text.as_bytes())?;
        }
        if let Some(text) = &self.module {
            folder.write(module::FILE, text.as_bytes())?;
        }
        if self.fits() {
            folder.write("env.sh", self.env.as_bytes())?;
        }
        Ok(())
    }
}
