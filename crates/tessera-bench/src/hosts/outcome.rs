//! What each host said about a fault, and whether that is what an operator must know.

use super::{HostFault, OTHER_END, VICTIM};
use crate::stream_process::StreamProcess;

/// How the rank of a host ended, and what it said.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct HostOutcome {
    /// Such as `exit 14` or `signal 9`.
    pub end: String,
    /// Code of the failure, if one was reported.
    pub code: Option<String>,
    /// Rank that the failure names.
    pub rank: Option<u64>,
    /// The failure in one line.
    pub said: String,
    /// Everything that the process wrote to its terminal.
    pub output: String,
}

impl HostOutcome {
    pub fn from_process(process: &mut StreamProcess) -> HostOutcome {
        process.try_reap();
        let output = process.output_text();
        let (code, rank) = process.reported_failure();
        let code = code.or_else(|| first_code(&output));
        HostOutcome { end: process.describe_end(), code, rank, said: describe_failure(&output), output }
    }

    /// Returns whether the host named a rank as slow at the end of its run.
    fn names_slow_rank(&self, rank: usize) -> bool {
        self.said == format!("complete, rank {rank} is slow")
    }

    /// Returns whether the host named another rank or host, by number or address.
    fn names_host(&self, host: usize) -> bool {
        let address = super::network::address_of(host);
        self.rank == Some(host as u64)
            || self.output.contains(&format!("rank {host}"))
            || self.output.contains(&address)
    }
}

/// Returns the failure as one line: the line with its code and the next one.
fn describe_failure(output: &str) -> String {
    let lines: Vec<&str> = output.lines().collect();
    let is_failure = |l: &str| l.starts_with("failed[") || l.starts_with("error[");
    if let Some(at) = lines.iter().position(|l| is_failure(l)) {
        let next = lines.get(at + 1).map_or("", |l| l.trim());
        return format!("{}: {next}", lines[at]);
    }
    // Rank 0 prints its result as JSON.
    let json: Option<serde_json::Value> = lines.last().and_then(|l| serde_json::from_str(l).ok());
    match json {
        Some(v) if v["failure"].is_object() => {
            let text = |key: &str| v["failure"][key].as_str().unwrap_or("").to_string();
            format!("[{}] rank {}: {}", text("code"), v["failure"]["rank"], text("text"))
        }
        Some(v) if v["message"].is_string() => {
            format!("[{}] {}", v["code"].as_str().unwrap_or(""), v["message"].as_str().unwrap_or(""))
        }
        Some(v) if v["slow_rank"].is_object() => format!("complete, rank {} is slow", v["slow_rank"]["rank"]),
        Some(_) => "complete".to_string(),
        None => lines.last().map_or(String::new(), |l| (*l).to_string()),
    }
}

/// Returns the first code in a text, such as `T0740`.
fn first_code(text: &str) -> Option<String> {
    let mut words = text.split(|c: char| !c.is_ascii_alphanumeric());
    let is_code = |w: &&str| w.len() == 5 && w.starts_with('T') && w[1..].bytes().all(|b| b.is_ascii_digit());
    words.find(is_code).map(str::to_string)
}

/// Lists what is wrong with the reports of a fault.
pub fn find_defects(fault: HostFault, hosts: &[HostOutcome], left_behind: usize) -> Vec<String> {
    let mut defects = Vec::new();
    if left_behind > 0 {
        defects.push(format!("{left_behind} processes were left behind"));
    }
    for (host, outcome) in hosts.iter().enumerate() {
        let mut require = |is_met: bool, what: &str| {
            if !is_met {
                defects.push(format!("host {host} {what}: {}", outcome.said));
            }
        };
        let is_victim = host == VICTIM;
        match fault {
            HostFault::WrongClock => require(outcome.end == "exit 0", "did not complete"),
            HostFault::HostSlow => {
                require(outcome.end == "exit 0", "did not complete");
                // Rank 0 has the record of all ranks.
                require(host != 0 || outcome.names_slow_rank(VICTIM), "did not name the slow host");
            }
            HostFault::HostCut => {
                require(
                    is_victim || outcome.rank == Some(VICTIM as u64),
                    "did not blame the host that is cut off",
                );
                require(!is_victim || outcome.rank != Some(VICTIM as u64), "blamed itself");
            }
            HostFault::HostGone => {
                require(
                    is_victim || outcome.rank == Some(VICTIM as u64),
                    "did not blame the host that is gone",
                );
            }
            HostFault::DataLinkCut => {
                // Both ends still reach the leader, so no rank is at fault, and every host must learn
                // which link it is.
                require(outcome.rank.is_none(), "blamed a rank for the link");
                require(
                    outcome.names_host(VICTIM) && outcome.names_host(OTHER_END),
                    "did not name both ends of the link",
                );
            }
            HostFault::WrongBinary => {
                require(outcome.code.as_deref() == Some("T0740"), "did not report the difference");
                require(outcome.names_host(VICTIM), "did not name the host with the other build");
            }
            HostFault::WrongSecret => {
                let code = if is_victim || host == 0 { "T0756" } else { "T0758" };
                require(outcome.output.contains(code), &format!("did not report {code}"));
                require(outcome.end != "exit 0", "did not fail");
            }
        }
    }
    defects
}

#[cfg(test)]
mod tests {
    use super::*;

    fn make_outcome(end: &str, rank: Option<u64>, output: &str) -> HostOutcome {
        HostOutcome {
            end: end.into(),
            code: first_code(output),
            rank,
            said: describe_failure(output),
            output: output.into(),
        }
    }

    #[test]
    fn a_host_that_blames_a_rank_for_a_link_is_a_defect() {
        let good = "failed[T0745]: an engine failed\n  rank 2 lost its data link to rank 3 in send over pp\n";
        let mut hosts: Vec<_> = [2, 2, 2, 2].map(|_| make_outcome("exit 14", None, good)).into();
        assert_eq!(find_defects(HostFault::DataLinkCut, &hosts, 0), Vec::<String>::new());
        hosts[3].rank = Some(3);
        let found = find_defects(HostFault::DataLinkCut, &hosts, 1);
        assert_eq!(found.len(), 2, "{found:?}");
        assert!(found[1].starts_with("host 3 blamed a rank for the link: failed[T0745]"), "{found:?}");
    }

    #[test]
    fn a_slow_host_that_nobody_names_is_a_defect() {
        let hosts_of =
            |json: &str| vec![make_outcome("exit 0", None, json), make_outcome("exit 0", None, "")];
        let found = |json: &str| find_defects(HostFault::HostSlow, &hosts_of(json), 0);
        assert_eq!(found(r#"{"slow_rank": {"rank": 2}}"#), Vec::<String>::new());
        assert_eq!(
            found(r#"{"slow_rank": {"rank": 1}}"#),
            ["host 0 did not name the slow host: complete, rank 1 is slow"]
        );
        assert_eq!(found(r#"{"slow_rank": null}"#), ["host 0 did not name the slow host: complete"]);
    }

    #[test]
    fn a_run_that_must_complete_and_does_not_is_a_defect() {
        let hosts = [
            make_outcome("exit 0", None, "{}"),
            make_outcome("exit 12", Some(2), "failed[T0743]: x, rank 2\n  y"),
        ];
        let found = find_defects(HostFault::WrongClock, &hosts, 0);
        assert_eq!(found, ["host 1 did not complete: failed[T0743]: x, rank 2: y"]);
        assert_eq!(hosts[0].said, "complete");
        assert_eq!(first_code("see T074 and T0740."), Some("T0740".to_string()));
    }
}
