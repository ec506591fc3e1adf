//! Writes the output folder of `tessera plan` when it plans by estimate.

use std::path::Path;

use tessera::Plan;
use tessera::files::StagedFolder;
use tessera_base::Diagnostic;
use tessera_report::mermaid::timeline_gantt;
use tessera_report::perfetto::trace_json;
use tessera_report::timeline::TimeWindow;

use crate::report::EstimateReport;
use crate::{attention_program, rank_table};

impl EstimateReport {
    /// Writes the HTML report, the estimate as JSON, the timeline as a trace and as a Gantt chart,
    /// the rank table and the environment file. The folder is created atomically.
    ///
    /// # Errors
    /// Fails if the folder exists or cannot be written.
    pub fn write(&self, dir: &Path) -> Result<(), Diagnostic> {
        let mut folder = StagedFolder::create(dir)?;
        self.write_files(&mut folder)?;
        folder.commit()
    }

    /// Writes a sealed plan and its estimate into one folder.
    ///
    /// # Errors
    /// Fails if the folder exists or cannot be written.
    pub fn write_with_plan(&self, plan: &Plan, dir: &Path) -> Result<(), Diagnostic> {
        let mut folder = StagedFolder::create(dir)?;
        plan.write_into(&mut folder, "")?;
        self.write_files(&mut folder)?;
        folder.commit()
    }

    fn write_files(&self, folder: &mut StagedFolder) -> Result<(), Diagnostic> {
        folder.write("report.html", self.to_html().as_bytes())?;
        let json = serde_json::to_string_pretty(&self.json).unwrap_or_default() + "\n";
        folder.write("estimate.json", json.as_bytes())?;
        if !self.timeline.spans.is_empty() {
            folder.write("timeline.json", trace_json(&self.timeline).as_bytes())?;
            let whole = TimeWindow { start_ns: 0, end_ns: u64::MAX };
            folder.write("timeline.mmd", timeline_gantt(&self.timeline, whole).as_bytes())?;
        }
        if let Some(text) = &self.rank_table {
            folder.write(rank_table::RANK_TABLE_FILE, text.as_bytes())?;
        }
        if let Some(text) = &self.attention_program {
            folder.write(attention_program::ATTENTION_FILE, text.as_bytes())?;
        }
        if self.is_feasible() {
            folder.write("env.sh", self.env_script.as_bytes())?;
        }
        Ok(())
    }
}
