//! `tessera stream` as the only process that a launcher started on this host: starts the ranks of
//! the host as processes, which join the ranks of other hosts.

use std::ffi::OsString;

use tessera::launchers::{LAUNCHER_VARIABLES, LauncherPlacement, RankShare};
use tessera::program_command::ProgramCommand;
use tessera::terminal::print_stderr_line;
use tessera::{
    HOST_PROCESS_VARIABLE, HostRanksSpec, end_with_host_process, host_exit_status, run_host_ranks,
};

use crate::output::CliResult;
use crate::progress::{EXIT_INTERRUPTED, STOPPING_MESSAGE, stop_on_signals};

/// Starts the ranks of this host with this process's own arguments, and waits for their end.
pub fn run(program: &ProgramCommand, share: RankShare, placement: &LauncherPlacement) -> CliResult {
    let mut argv: Vec<OsString> = program.to_argv(&[]).into_iter().map(OsString::from).collect();
    // What precedes the verb is the program, or the interpreter that embeds it.
    argv.extend(std::env::args_os().skip_while(|argument| argument != "stream"));
    let (host, port) = &placement.leader;
    let ranks = (share.first..share.first + share.count).map(|rank| {
        let variables = vec![
            ("RANK", rank.to_string()),
            ("WORLD_SIZE", share.world.to_string()),
            ("LOCAL_RANK", (rank - share.first).to_string()),
            ("LOCAL_WORLD_SIZE", share.count.to_string()),
            ("MASTER_ADDR", host.clone()),
            ("MASTER_PORT", port.to_string()),
        ];
        (rank, variables)
    });
    let ranks = ranks.collect();
    let spec = HostRanksSpec { argv, removed_variables: LAUNCHER_VARIABLES.to_vec(), ranks };
    let exits = stop_on_signals(STOPPING_MESSAGE, |stop| run_host_ranks(&spec, stop))?;
    // A stream that was stopped on request has not failed.
    let is_fine = |status| [Some(0), Some(i32::from(EXIT_INTERRUPTED))].contains(&status);
    if let Some(first) = exits.iter().find(|exit| !is_fine(exit.status)) {
        print_stderr_line(&format!("rank {} of this host failed first: {}", first.rank, first.to_sentence()));
    }
    Ok(u8::try_from(host_exit_status(&exits)).unwrap_or(1))
}

/// Ties this process to the process of this host that started it, if there is one.
pub fn tie_to_host_process() {
    let id = std::env::var(HOST_PROCESS_VARIABLE).ok().and_then(|text| text.parse().ok());
    if let Some(id) = id {
        end_with_host_process(id);
    }
}
