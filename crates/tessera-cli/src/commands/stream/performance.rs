//! The performance mode of `tessera stream`, which starts only behind green gates.

use std::path::PathBuf;
use std::time::{SystemTime, UNIX_EPOCH};

use clap::builder::NonEmptyStringValueParser;
use tessera::Plan;
use tessera::codes::T0040;
use tessera::machine_shape::describe_machine;
use tessera::stream_options::RunDevice;
use tessera_base::Diagnostic;
use tessera_tools::RunHost;
use tessera_tools::gate_record::{PerformanceRun, check_performance_run};

use crate::output::{CliError, OutputFormat, print_diagnostics};

const HEADING: &str = "Performance mode";
/// Default of `--max-gate-age`, in hours.
const DEFAULT_MAX_AGE_H: u64 = 24;

/// The options of the performance mode.
#[derive(Debug, clap::Args)]
#[command(next_help_heading = HEADING)]
pub struct PerformanceArgs {
    /// Start only if the gates of this plan, build and machine are green
    #[arg(long)]
    performance: bool,

    /// The gates, as `tessera record gates` or `tessera bringup` wrote them with the same option
    #[arg(long, value_name = "FILE", requires = "performance")]
    gate_record: Option<PathBuf>,

    /// Maximum age of the runs behind the gates, in hours [default: 24]
    #[arg(long, value_name = "HOURS", requires = "performance", value_parser = clap::value_parser!(u64).range(1..=8_760))]
    max_gate_age: Option<u64>,

    /// Start although the gates do not allow it; the reason is shown on the terminal and stands in
    /// record.jsonl and the report
    #[arg(long, value_name = "REASON", requires = "performance", value_parser = NonEmptyStringValueParser::new())]
    override_gates: Option<String>,
}

impl PerformanceArgs {
    /// Checks the gates, and returns what the record of the run says about them; `None` outside of
    /// the performance mode. An override is printed as a warning.
    ///
    /// # Errors
    /// T0063, and T0040 for a simulated run, which measures nothing.
    pub fn check_gates(
        &self,
        plan: &Plan,
        device: RunDevice,
        format: OutputFormat,
    ) -> Result<Option<String>, CliError> {
        if !self.performance {
            return Ok(None);
        }
        if device == RunDevice::Sim {
            return Err(CliError::usage(
                Diagnostic::error(&T0040, "--performance requires ranks that run on this machine")
                    .with_label("--device sim", "all times are estimates")
                    .with_hint("leave out --performance, or run on another device"),
            ));
        }
        let run = PerformanceRun {
            plan: plan.sealed.digest_hex(),
            host: RunHost { build: tessera::build_id(), machine_shape: describe_machine(device) },
            now_s: SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |d| d.as_secs()),
            max_age_s: self.max_gate_age.unwrap_or(DEFAULT_MAX_AGE_H) * 3600,
        };
        let (gates, reason) = (self.gate_record.as_deref(), self.override_gates.as_deref());
        let (detail, warning) = check_performance_run(gates, reason, &run)?;
        print_diagnostics(warning.as_slice(), format.into(), &|_| None);
        Ok(Some(detail))
    }
}
