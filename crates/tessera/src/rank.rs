//! The process of one rank: it joins the run, verifies the plan again, loads and runs; the leader
//! also closes the record.

mod context;
mod leader_main;
mod worker_main;

use std::sync::Arc;

use tessera_base::{Diagnostic, DiagnosticFormat, Diagnostics, render_all};
use tessera_mesh::Rank;
use tessera_runtime::driver::{JoinedRank, exit_process, exit_without_handlers, join_launch};
use tessera_runtime::{Failure, FailureClass};

use crate::codes::T0012;
use crate::plan::Plan;
use crate::rank_config::RankConfig;
use crate::terminal::{print_stderr, print_stderr_line};
use context::report_refusal;

pub(crate) use context::{LeaderEvent, LeaderEventHandler, RankContext, RankSetup, build_cpu_backend};
pub(crate) use leader_main::run_as_leader;
pub(crate) use worker_main::run_follower;

/// Runs one rank to its end and returns the exit status of its process. `on_joined` is called once
/// the rank holds its links; from then on the launcher handles the first interrupt.
#[must_use]
pub fn rank_main(on_joined: impl FnOnce()) -> i32 {
    let joined = match join_launch() {
        Ok(j) => j,
        Err(d) => return print_diagnostics(&[d]),
    };
    on_joined();
    let orders: RankConfig = match serde_json::from_slice(&joined.welcome.payload) {
        Ok(o) => o,
        Err(e) => {
            print_stderr_line(&format!("tessera rank: the launcher's configuration cannot be parsed: {e}"));
            return FailureClass::Parity.exit_code();
        }
    };
    let rank = Rank(joined.welcome.rank);
    let outcome = match RankSetup::from_launcher(joined, &orders) {
        Ok(arrival) if rank.0 == 0 => run_as_leader(|| Ok(arrival), &orders),
        Ok(arrival) => run_follower(|| Ok(arrival), &orders, rank),
        Err(refused) => refused.map(Some),
    };
    // Exit handlers of the GPU libraries would wait for work that never ends.
    let exit_process = if orders.gpus.is_some() { exit_without_handlers } else { exit_process };
    match outcome {
        // After a clean run the GPU libraries' exit handlers may run, however long they take.
        Ok(None) if orders.gpus.is_some() => exit_process(0),
        Ok(None) => 0,
        // The launcher prints the cause once. The leader prints it only if the launcher is gone.
        Ok(Some(f)) => {
            if rank.0 == 0 && f.class == FailureClass::LauncherGone {
                print_stderr_line(&format!("tessera: {}: {} ({})", f.class.as_str(), f.text, f.code));
            }
            exit_process(f.class.exit_code())
        }
        Err(ds) => print_diagnostics(&ds),
    }
}

fn print_diagnostics(ds: &[Diagnostic]) -> i32 {
    print_stderr(&render_all(ds, DiagnosticFormat::Text, &|_| None));
    FailureClass::Preflight.exit_code()
}

impl RankSetup {
    /// Builds the setup of a launched rank. `Err(Ok(failure))` means that the launcher or the
    /// leader has already received the failure.
    fn from_launcher(
        mut joined: JoinedRank,
        orders: &RankConfig,
    ) -> Result<RankSetup, Result<Failure, Diagnostics>> {
        let plan = load_plan(orders).map_err(|ds| report_refusal(&mut joined, ds))?;
        let common = RankContext::new(plan, orders.delays);
        let mut fds = std::mem::take(&mut joined.extra_fds);
        let piped = if joined.welcome.rank == 0 { orders.outputs.pipes.len() } else { 0 };
        let frame_pipes = fds.split_off(fds.len().saturating_sub(piped));
        Ok(RankSetup {
            joined,
            communicators: fds.into(),
            context: common,
            frame_pipes,
            interrupt: None,
            on_event: None,
        })
    }
}

/// Reads and verifies the plan, and checks that its digest is the configured one.
fn load_plan(orders: &RankConfig) -> Result<Arc<Plan>, Diagnostics> {
    let plan = Plan::read(&orders.plan)?;
    let found = plan.sealed.digest_hex();
    if found != orders.digest {
        return Err(vec![
            Diagnostic::error(&T0012, "this rank reads another plan than the launcher")
                .with_label("launcher", format!("digest {}", orders.digest))
                .with_label(orders.plan.display().to_string(), format!("digest {found}")),
        ]);
    }
    Ok(Arc::new(plan))
}
