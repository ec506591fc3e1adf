//! Tasks that `srun` started. The batch script of a job has most of the variables too, with
//! SLURM_PROCID 0, although it is no task; only the number of a step tells them apart.

use std::collections::BTreeMap;

use tessera_base::Diagnostic;

use super::ProcessPlace;
use super::host_list::{expand_hosts, expand_task_counts};
use super::variables::Variables;
use crate::codes::T0034;

/// Steps from this number on are no tasks of `srun`: the batch script, the interactive shell and
/// the external step.
const FIRST_SPECIAL_STEP: u32 = 0xffff_fff0;

const STEP: [&str; 2] = ["SLURM_STEP_ID", "SLURM_STEPID"];
pub(super) const TASKS: [&str; 3] = ["SLURM_STEP_NUM_TASKS", "SLURM_NTASKS", "SLURM_NPROCS"];
const HOSTS: [&str; 2] = ["SLURM_STEP_NUM_NODES", "SLURM_NNODES"];
const HOST_LIST: [&str; 3] = ["SLURM_STEP_NODELIST", "SLURM_JOB_NODELIST", "SLURM_NODELIST"];
pub(super) const TASKS_PER_HOST: [&str; 2] = ["SLURM_STEP_TASKS_PER_NODE", "SLURM_TASKS_PER_NODE"];

/// Returns whether the environment is that of a task of a step.
pub(super) fn is_task(environment: &BTreeMap<String, String>) -> bool {
    let step = STEP.iter().find_map(|name| environment.get(*name)?.trim().parse::<u32>().ok());
    environment.contains_key("SLURM_PROCID") && step.is_some_and(|step| step < FIRST_SPECIAL_STEP)
}

pub(super) fn read_place(variables: &mut Variables<'_>) -> Option<ProcessPlace> {
    let [process] = variables.required(["SLURM_PROCID"])?;
    // The number of the step decided that this is a task, so it belongs to what was read.
    variables.first_text(&STEP);
    let Some(processes) = variables.first_number(&TASKS) else {
        variables.reject(missing_variable(TASKS[0]));
        return None;
    };
    let mut place = ProcessPlace::new(process, processes);
    place.local_process = variables.number("SLURM_LOCALID", u32::MAX);
    place.cores = variables.number("SLURM_CPUS_PER_TASK", u32::MAX);
    let host = variables.number("SLURM_NODEID", u32::MAX);
    let hosts = variables.first_number(&HOSTS);
    place.host = host.zip(hosts);
    read_host_list(variables, &mut place);
    read_task_counts(variables, &mut place);
    Some(place)
}

fn read_host_list(variables: &mut Variables<'_>, place: &mut ProcessPlace) {
    let Some((name, text)) = variables.first_text(&HOST_LIST) else {
        return variables.reject(missing_variable(HOST_LIST[0]));
    };
    let names = match expand_hosts(&text) {
        Ok(names) => names,
        Err(why) => {
            let d = Diagnostic::error(&T0034, format!("{name} is no list of hosts: {why}"));
            return variables.reject(d.with_label(name, format!("`{text}`")));
        }
    };
    if let Some((host, hosts)) = place.host
        && (names.len() != hosts as usize || host >= hosts)
    {
        variables.reject(
            Diagnostic::error(&T0034, "the hosts of the step contradict their list")
                .with_label(name, format!("{} hosts", names.len()))
                .with_label(HOSTS[0], hosts.to_string())
                .with_label("SLURM_NODEID", host.to_string()),
        );
    }
    // Task 0 runs on the first host of the list: `read_task_counts` rejects every distribution but block.
    place.leader_host = names.into_iter().next();
}

fn read_task_counts(variables: &mut Variables<'_>, place: &mut ProcessPlace) {
    let Some((name, text)) = variables.first_text(&TASKS_PER_HOST) else {
        return variables.reject(missing_variable(TASKS_PER_HOST[0]));
    };
    let counts = match expand_task_counts(&text) {
        Ok(counts) => counts,
        Err(why) => {
            let d = Diagnostic::error(&T0034, format!("{name} is no list of counts: {why}"));
            return variables.reject(d.with_label(name, format!("`{text}`")));
        }
    };
    let sum: u64 = counts.iter().map(|n| u64::from(*n)).sum();
    let hosts = place.host.map_or(counts.len(), |(_, hosts)| hosts as usize);
    if sum != u64::from(place.processes) || counts.len() != hosts {
        return variables.reject(
            Diagnostic::error(&T0034, "the tasks per host contradict the number of tasks or hosts")
                .with_label(name, format!("{sum} tasks on {} hosts", counts.len()))
                .with_label(TASKS[0], place.processes.to_string())
                .with_label(HOSTS[0], hosts.to_string()),
        );
    }
    let Some((host, _)) = place.host.filter(|(host, _)| (*host as usize) < counts.len()) else { return };
    place.local_processes = Some(counts[host as usize]);
    let before: u32 = counts[..host as usize].iter().sum();
    let in_order = place.local_process.is_none_or(|local| before.checked_add(local) == Some(place.process));
    if !in_order {
        variables.reject(
            Diagnostic::error(&T0034, "the tasks of a host do not have consecutive numbers")
                .with_label("SLURM_PROCID", place.process.to_string())
                .with_label("SLURM_LOCALID", place.local_process.unwrap_or(0).to_string())
                .with_label(format!("tasks of the {host} hosts before"), before.to_string())
                .with_hint("start the tasks with `srun --distribution=block`"),
        );
    }
}

fn missing_variable(name: &str) -> Diagnostic {
    Diagnostic::error(&T0034, format!("SLURM_PROCID and SLURM_STEP_ID are set and {name} is not"))
        .with_hint("`srun` sets all of them: start the process with srun, or unset SLURM_STEP_ID")
}
