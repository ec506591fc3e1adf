//! Tests of the recognition of launchers. The files in `launchers/` hold the variables that real
//! launchers set; the first line of each says which one, and how it was started.

#![allow(clippy::unwrap_used, reason = "a test that cannot set itself up fails")]

use std::collections::BTreeMap;
use std::path::Path;

use tessera::Mesh;
use tessera::launchers::{DEFAULT_PORT, Launcher, LauncherPlacement, RankShare, find_placement, share_ranks};
use tessera_base::Diagnostics;

type Environment = BTreeMap<String, String>;

fn recorded(name: &str) -> Environment {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/launchers").join(name);
    let text = std::fs::read_to_string(path).unwrap();
    let pairs = text.lines().filter(|l| !l.starts_with('#')).map(|l| l.split_once('=').unwrap());
    pairs.map(|(name, value)| (name.to_string(), value.to_string())).collect()
}

fn with(mut environment: Environment, set: &[(&str, &str)]) -> Environment {
    for (name, value) in set {
        environment.insert((*name).to_string(), (*value).to_string());
    }
    environment
}

fn without(mut environment: Environment, names: &[&str]) -> Environment {
    environment.retain(|name, _| !names.contains(&name.as_str()));
    environment
}

fn place(environment: &Environment) -> LauncherPlacement {
    find_placement(environment, None).unwrap().unwrap()
}

fn refuse(environment: &Environment, code: &str, words: &[&str]) -> Diagnostics {
    let found = find_placement(environment, None).unwrap_err();
    let text = format!("{found:?}");
    assert!(found.iter().any(|d| d.code.id == code), "{code} in {text}");
    assert!(words.iter().all(|w| text.contains(w)), "{words:?} in {text}");
    found
}

#[test]
fn a_slurm_task_knows_its_host_and_meets_the_others_on_the_first_one() {
    let uneven = place(&recorded("srun-uneven.env"));
    assert_eq!((uneven.launcher, uneven.process, uneven.processes), (Launcher::Slurm, 4, 7));
    assert_eq!((uneven.host, uneven.local_process, uneven.local_processes), (Some((1, 4)), Some(0), Some(1)));
    assert_eq!(uneven.leader, ("node01".to_string(), DEFAULT_PORT));
    let said = uneven.describe();
    for word in ["Slurm: process 4 of 7, host 1 of 4, rank 0 at node01:29500", "SLURM_PROCID=4"] {
        assert!(said.contains(word), "{said}");
    }
    let per_host = place(&recorded("srun-per-host.env"));
    assert_eq!((per_host.process, per_host.host, per_host.cores), (2, Some((2, 4)), Some(2)));
    // The batch script has SLURM_PROCID=0 and SLURM_NTASKS=4, and is no task.
    assert_eq!(find_placement(&recorded("sbatch-script.env"), None), Ok(None));
    let shell = with(recorded("srun-per-host.env"), &[("SLURM_STEP_ID", "4294967290")]);
    assert_eq!(find_placement(&shell, None), Ok(None), "an interactive shell is no task");
}

#[test]
fn the_port_of_torchrun_is_taken_by_torchrun() {
    let recorded = recorded("torchrun.env");
    let p = place(&recorded);
    assert_eq!((p.launcher, p.process, p.processes, p.host), (Launcher::Torchrun, 1, 2, Some((0, 1))));
    let port: u16 = recorded["MASTER_PORT"].parse().unwrap();
    assert_eq!(p.leader, ("localhost".to_string(), port + 1));
    assert_eq!(find_placement(&recorded, Some(7)).unwrap().unwrap().leader.1, 7);
    let own_store = without(recorded.clone(), &["TORCHELASTIC_USE_AGENT_STORE"]);
    assert_eq!(place(&own_store).leader.1, port);
    let last = with(recorded, &[("MASTER_PORT", "65535")]);
    assert_eq!(place(&last).leader.1, 65534);
}

#[test]
fn processes_of_one_host_meet_at_its_loopback_address() {
    for name in ["open-mpi.env", "mpich.env"] {
        let p = place(&recorded(name));
        assert_eq!((p.process, p.processes, p.leader.0.as_str()), (2, 3, "127.0.0.1"), "{name}");
    }
    let two_hosts = with(recorded("open-mpi.env"), &[("OMPI_COMM_WORLD_SIZE", "6")]);
    refuse(&two_hosts, "T0034", &["Open MPI does not state the host of rank 0, and MASTER_ADDR is not set"]);
    let told = with(two_hosts, &[("MASTER_ADDR", "head"), ("MASTER_PORT", "7000")]);
    assert_eq!(place(&told).leader, ("head".to_string(), 7000));
}

#[test]
fn a_pod_of_a_leader_worker_set_is_a_host() {
    let set = [("LWS_LEADER_ADDRESS", "lws-0.lws.ns"), ("LWS_GROUP_SIZE", "18"), ("LWS_WORKER_INDEX", "17")];
    let pod = with(Environment::new(), &set);
    let p = place(&pod);
    assert_eq!((p.launcher, p.process, p.local_processes), (Launcher::LeaderWorkerSet, 17, Some(1)));
    assert_eq!(p.leader, ("lws-0.lws.ns".to_string(), DEFAULT_PORT));
    refuse(&without(pod.clone(), &["LWS_LEADER_ADDRESS"]), "T0034", &["LWS_LEADER_ADDRESS is not"]);
    refuse(&without(pod.clone(), &["LWS_WORKER_INDEX"]), "T0034", &["LWS_WORKER_INDEX is not"]);
    refuse(&with(pod, &[("LWS_WORKER_INDEX", "18")]), "T0034", &["no process 18 among 18"]);
}

#[test]
fn incomplete_and_contradicting_variables_are_refused_by_name() {
    let slurm = || recorded("srun-uneven.env");
    let changed = |name: &str, value: &str| with(slurm(), &[(name, value)]);
    refuse(&changed("SLURM_PROCID", "7"), "T0034", &["no process 7 among 7"]);
    refuse(&changed("SLURM_PROCID", "-1"), "T0034", &["SLURM_PROCID is not a whole number"]);
    refuse(&changed("SLURM_LOCALID", "1"), "T0034", &["no process 1 among the 1 of this host"]);
    refuse(&changed("SLURM_PROCID", "5"), "T0034", &["consecutive", "--distribution=block"]);
    refuse(&changed("SLURM_STEP_NUM_TASKS", "8"), "T0034", &["7 tasks on 4 hosts"]);
    refuse(&changed("SLURM_STEP_NUM_NODES", "5"), "T0034", &["contradict their list"]);
    refuse(
        &changed("SLURM_STEP_NODELIST", "node[01-"),
        "T0034",
        &["SLURM_STEP_NODELIST is no list of hosts"],
    );
    refuse(&changed("SLURM_STEP_TASKS_PER_NODE", "4(x"), "T0034", &["no list of counts"]);
    let lists = ["SLURM_STEP_NODELIST", "SLURM_JOB_NODELIST", "SLURM_NODELIST"];
    refuse(&without(slurm(), &lists), "T0034", &["SLURM_STEP_NODELIST is not"]);
    let counts = ["SLURM_STEP_NUM_TASKS", "SLURM_NTASKS", "SLURM_NPROCS"];
    refuse(&without(slurm(), &counts), "T0034", &["SLURM_STEP_NUM_TASKS is not"]);
    let script = with(Environment::new(), &[("RANK", "1"), ("WORLD_SIZE", "2")]);
    refuse(&script, "T0034", &["RANK and WORLD_SIZE are set, and MASTER_ADDR and MASTER_PORT are not set"]);
    let script = with(script, &[("MASTER_ADDR", "a"), ("MASTER_PORT", "65536")]);
    refuse(&script, "T0034", &["MASTER_PORT is not a whole number from 0 to 65535"]);
    refuse(
        &with(Environment::new(), &[("WORLD_SIZE", "2")]),
        "T0034",
        &["WORLD_SIZE is set and RANK is not"],
    );
    let local = with(script, &[("MASTER_PORT", "1"), ("LOCAL_RANK", "2")]);
    refuse(&local, "T0034", &["process 1 cannot have 2 processes of its host before it"]);
    let all_wrong = with(slurm(), &[("SLURM_LOCALID", "x"), ("SLURM_STEP_TASKS_PER_NODE", "x")]);
    assert_eq!(refuse(&all_wrong, "T0034", &[]).len(), 2, "all mistakes are reported at once");
}

#[test]
fn the_inner_launcher_counts_and_a_contradiction_is_refused() {
    // torchrun with two processes on each host, under srun with one task per host.
    let inner = recorded("torchrun.env");
    let both = recorded("srun-per-host.env").into_iter().chain(inner).collect();
    let p = place(&both);
    assert_eq!((p.launcher, p.ignored.as_slice()), (Launcher::Torchrun, &[Launcher::Slurm][..]));
    assert!(p.describe().contains("variables of Slurm are set too and do not count"), "{}", p.describe());
    // A script under srun that passes the index on, and one that exports a constant.
    let script = |rank| {
        let set = [("RANK", rank), ("WORLD_SIZE", "4"), ("MASTER_ADDR", "node01"), ("MASTER_PORT", "7000")];
        with(recorded("srun-per-host.env"), &set)
    };
    assert_eq!(place(&script("2")).launcher, Launcher::Script);
    refuse(&script("0"), "T0067", &["indices 0 and 2", "Slurm", "process 2 of 4"]);
}

#[test]
fn ranks_are_divided_among_hosts_with_the_leader_outside_on_the_first() {
    let at = |name: &str, process: u32, processes: u32, local: Option<u32>| LauncherPlacement {
        process,
        processes,
        local_processes: local,
        ..place(&recorded(name))
    };
    let share = |p: &LauncherPlacement, mesh: &str| share_ranks(p, &mesh.parse::<Mesh>().unwrap());
    let rack = "tp=8,pp=9,outside=1";
    let shares: Vec<RankShare> =
        (0..18).map(|host| share(&at("srun-per-host.env", host, 18, Some(1)), rack).unwrap()).collect();
    assert_eq!(shares[0], RankShare { first: 0, count: 5, world: 73 });
    assert_eq!(shares[17], RankShare { first: 69, count: 4, world: 73 });
    assert!(shares.windows(2).all(|w| w[0].first + w[0].count == w[1].first));
    let one = share(&at("mpich.env", 2, 3, Some(3)), "tp=3").unwrap();
    assert_eq!(one, RankShare { first: 2, count: 1, world: 3 });
    for (processes, local, mesh, why) in [
        (3, Some(3), "tp=6", "one process on each host"),
        (5, Some(1), "tp=6", "divides 6 ranks"),
        (3, None, "tp=6", "one process on each host"),
        (9, Some(1), "tp=6", "divides 6 ranks"),
    ] {
        let d = share(&at("mpich.env", 2, processes, local), mesh).unwrap_err();
        assert_eq!(d.code.id, "T0068");
        assert!(d.hint.as_deref().unwrap().contains(why), "{d:?}");
    }
}
