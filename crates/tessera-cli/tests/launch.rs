//! Tests of `tessera launch`, which places the ranks of a plan on hosts and starts nothing.

#![allow(clippy::unwrap_used, reason = "a test that cannot set itself up fails")]

mod support;

use serde_json::Value;

use support::{assert_ends_with, both_outputs, run_tessera, tessera_command, to_text};

/// A folder with a plan of four ranks.
struct PlanFolder(tempfile::TempDir);

impl PlanFolder {
    fn new(more: &[&str]) -> PlanFolder {
        let folder = PlanFolder(tempfile::tempdir().unwrap());
        let path = folder.path();
        let base = ["plan", "models/demo", "--mesh", "tp=2,pp=2", "--out", &path];
        let o = run_tessera(&[&base[..], more].concat());
        assert_eq!(o.status.code(), Some(0), "{}", both_outputs(&o));
        folder
    }

    fn path(&self) -> String {
        self.0.path().join("plan").display().to_string()
    }

    fn launch(&self, more: &[&str], set: &[(&str, &str)]) -> String {
        let mut c = tessera_command(&[&["launch", &self.path()][..], more].concat());
        for name in ["NCCL_ALGO", "NCCL_NVLS_ENABLE", "NCCL_SOCKET_IFNAME", "TESSERA_SECRET_FILE"] {
            c.env_remove(name);
        }
        let o = c.envs(set.iter().copied()).output().unwrap();
        assert_eq!(o.status.code(), Some(0), "{}", both_outputs(&o));
        to_text(&o.stdout)
    }

    fn launch_json(&self, more: &[&str], set: &[(&str, &str)]) -> Value {
        serde_json::from_str(&self.launch(&[more, &["--format", "json", "--dry-run"]].concat(), set)).unwrap()
    }
}

fn variable<'a>(rank: &'a Value, name: &str) -> &'a Value {
    let all = rank["variables"].as_array().unwrap();
    all.iter().find(|v| v["name"] == name).unwrap_or_else(|| panic!("no {name} in {rank}"))
}

#[test]
fn ranks_are_placed_and_groups_that_span_hosts_are_counted() {
    let plan = PlanFolder::new(&[]);
    let v = plan.launch_json(&["--hosts", "far[1-2]"], &[]);
    let ranks = v["ranks"].as_array().unwrap();
    let hosts: Vec<_> = ranks.iter().map(|r| r["host"].as_str().unwrap()).collect();
    assert_eq!(hosts, ["far1", "far1", "far2", "far2"]);
    assert_eq!((&ranks[3]["coordinates"], &ranks[3]["local_rank"]), (&"tp=1,pp=1".into(), &1.into()));
    assert_eq!(ranks[0]["cores"], "unknown until the host is asked");
    assert_eq!(variable(&ranks[3], "MASTER_ADDR")["value"], "far1");
    // tp stays on a host; the pipeline crosses.
    let groups = v["groups"].as_array().unwrap();
    let of = |op: &str| groups.iter().filter(|g| g["op"] == op).collect::<Vec<_>>();
    assert!(!of("all_to_all").is_empty() && !of("send").is_empty(), "{groups:#?}");
    assert!(of("all_to_all").iter().all(|g| g["path"] == "peer memory" && g["bytes_between_hosts"] == 0));
    let send = of("send")[0];
    assert_eq!((&send["path"], &send["groups"]), (&"network".into(), &"4 pairs of pp".into()));
    assert_eq!(send["on_several_hosts"], 4);
    assert!(send["bytes_between_hosts"].as_u64().unwrap() > 0);
    // With one rank per host, everything crosses.
    let v = plan.launch_json(&["--hosts", "a,b,c,d"], &[]);
    let groups = v["groups"].as_array().unwrap();
    assert!(groups.iter().all(|g| g["path"] == "network"), "{groups:#?}");
    let v = plan.launch_json(&["--hosts", "localhost"], &[]);
    assert!(v["groups"].as_array().unwrap().iter().all(|g| g["bytes_between_hosts"] == 0));
    assert_ne!(v["ranks"][0]["cores"], "unknown until the host is asked");
}

#[test]
fn a_value_of_the_user_is_kept() {
    let plan = PlanFolder::new(&[]);
    let own = [("NCCL_NVLS_ENABLE", "1"), ("TESSERA_SECRET_FILE", "/s")];
    let arguments = ["--hosts", "a,b", "--device", "cuda", "--secret", "/other"];
    let v = plan.launch_json(&arguments, &own);
    for (name, value) in own {
        let found = variable(&v["ranks"][3], name);
        assert_eq!((&found["value"], &found["source"]), (&value.into(), &"kept".into()), "{name}");
    }
    assert_eq!(variable(&v["ranks"][0], "NCCL_SOCKET_IFNAME")["source"], "open");
    assert_eq!(v["ranks"][3]["device"], "GPU 1");
    let text = plan.launch(&[&arguments[..], &["--dry-run"]].concat(), &own);
    assert!(text.contains("1  (kept: user's value)"), "{text}");
}

#[test]
fn commands_are_printed_and_nothing_is_started() {
    let plan = PlanFolder::new(&["--topology", "pp1"]);
    let text = plan.launch(&["--hosts", "head:1,far:4", "--secret", "my secret"], &[]);
    assert!(text.starts_with("# Nothing was started."), "{text}");
    let commands: Vec<&str> = text.lines().filter(|l| l.starts_with("env ")).collect();
    assert_eq!(commands.len(), 5, "{text}");
    assert!(
        commands[4].starts_with("env RANK=4 WORLD_SIZE=5 LOCAL_RANK=3 LOCAL_WORLD_SIZE=4 MASTER_ADDR=head")
    );
    assert!(commands[0].contains("TESSERA_SECRET_FILE='my secret' tessera stream --plan "), "{text}");
}

#[test]
fn a_plan_with_hosts_states_paths_and_refuses_hosts_that_split_one() {
    let plan = PlanFolder::new(&["--hosts", "2", "--format", "json"]);
    let path = plan.path();
    let read = run_tessera(&[
        "plan",
        "models/demo",
        "--mapping",
        &format!("{path}/mapping.toml"),
        "--format",
        "json",
    ]);
    let v: Value = serde_json::from_str(&to_text(&read.stdout)).unwrap();
    assert_eq!(v["hosts"]["ranks"], serde_json::json!([[0, 1], [2, 3]]));
    let seal: Value =
        serde_json::from_str(&std::fs::read_to_string(format!("{path}/seal.json")).unwrap()).unwrap();
    assert_eq!(v["digest"], seal["digest"], "the mapping keeps the hosts");
    let groups = v["groups"].as_array().unwrap();
    let of = |group: &str| groups.iter().filter(|g| g["group"] == group).collect::<Vec<_>>();
    assert!(of("tp").iter().all(|g| g["path"] == "peer memory" && g["bytes_between_hosts"] == 0));
    let (between, launched) = (of("pp"), plan.launch_json(&["--hosts", "a,b"], &[]));
    assert!(
        !between.is_empty() && between.iter().all(|g| g["path"] == "network" && g["is_transfer"] == true)
    );
    assert!(between.iter().any(|g| g["bytes_between_hosts"].as_u64().unwrap() > 0), "{v}");
    assert_eq!(launched["ranks"][3]["host"], "b");
    let launch = |hosts: &'static str| ["launch", "--dry-run", &path, "--hosts", hosts].map(String::from);
    // One host is never slower than two.
    let one = launch("a");
    assert_ends_with(&one.each_ref().map(String::as_str), 0, &["peer memory"]);
    let split = launch("a:1,b:3");
    let text = "rank 1 is on b, but the plan states it on host 0 with rank 0, which is on a";
    assert_ends_with(&split.each_ref().map(String::as_str), 1, &["T0777", text]);
}

#[test]
fn a_summary_shows_the_path_of_each_kind_of_group() {
    let plan = |more: &[&'static str]| [&["plan", "models/demo", "--mesh", "tp=2,pp=2"][..], more].concat();
    let text = to_text(&run_tessera(&plan(&["--hosts", "a:3,b:1"])).stdout);
    assert!(text.contains("2 hosts: ranks 0 to 2; 3"), "{text}");
    assert!(text.contains("1 group of tp  peer memory") && text.contains("1 group of tp  network"), "{text}");
    let text = to_text(&run_tessera(&["plan", "models/demo", "--mesh", "tp=4", "--hosts", "a:3,b:1"]).stdout);
    assert!(text.contains("hierarchical  NCCL for the whole group"), "{text}");
    assert!(!to_text(&run_tessera(&plan(&[])).stdout).contains("path of their data"));
    assert_ends_with(&plan(&["--hosts", "3"]), 2, &["T0066", "cannot be divided among 3 hosts"]);
    for number in ["0", "65537", "99999999999"] {
        assert_ends_with(&plan(&["--hosts", number]), 2, &["T0065", "there may be 1 to 65536"]);
    }
    assert_ends_with(
        &plan(&["--hosts", "2", "--cluster", "laptop"]),
        2,
        &["T0030", "--hosts does not apply"],
    );
    let spanning = ["plan", "models/demo", "--mesh", "tp=4", "--hosts", "2", "--transport", "p2p"];
    assert_ends_with(&spanning, 1, &["T0348", "group over tp of ranks 0, 1, 2, 3: hierarchical"]);
}

#[test]
fn a_summary_shows_nccl_within_a_host_if_the_plan_requests_it() {
    let plan = ["plan", "models/demo", "--mesh", "tp=2,pp=2", "--hosts", "1", "--transport"];
    for (transport, between_gpus) in [("best", "peer memory"), ("p2p", "peer memory"), ("nccl", "NCCL")] {
        let args = [&plan[..], &[transport]].concat();
        let row = format!("2 groups of tp  peer memory  {between_gpus} ");
        assert_ends_with(&args, 0, &[&row]);
        let json: Value =
            serde_json::from_str(&to_text(&run_tessera(&[&args[..], &["--format", "json"]].concat()).stdout))
                .unwrap();
        let groups = json["groups"].as_array().unwrap();
        assert!(!groups.is_empty() && groups.iter().all(|g| g["gpu_transport"] == between_gpus), "{json}");
    }
}

/// A plan of four ranks in one group of tp, whose all-reduces are tagged by a threshold.
fn tagged_plan(transport: &str, ring_from_bytes: u32) -> PlanFolder {
    let folder = PlanFolder(tempfile::tempdir().unwrap());
    let mapping = folder.0.path().join("mapping.toml");
    let text = format!(
        "[mesh]\ntp = 4\n[strategy]\ntp = \"megatron\"\n[collectives]\ntransport = \"{transport}\"\n\
         ring_from_bytes = {ring_from_bytes}\n"
    );
    std::fs::write(&mapping, text).unwrap();
    let path = folder.path();
    let o = run_tessera(&["plan", "models/demo", "--mapping", mapping.to_str().unwrap(), "--out", &path]);
    assert_eq!(o.status.code(), Some(0), "{}", both_outputs(&o));
    folder
}

#[test]
fn nccl_is_told_the_algorithm_of_a_plan_if_all_tags_are_equal() {
    let algorithm = |rank: &Value| {
        let all = rank["variables"].as_array().unwrap();
        let found = all.iter().find(|v| v["name"] == "NCCL_ALGO");
        found.map(|v| [&v["value"], &v["source"]].map(|text| text.as_str().unwrap().to_string()))
    };
    let set = |value: &str| Some([value.to_string(), "set".to_string()]);
    let cuda = ["--hosts", "a,b", "--device", "cuda"];
    for (threshold, value) in [(0, "allreduce:ring"), (u32::MAX, "allreduce:tree")] {
        let plan = tagged_plan("best", threshold);
        let v = plan.launch_json(&cuda, &[]);
        assert!(v["ranks"].as_array().unwrap().iter().all(|rank| algorithm(rank) == set(value)), "{v:#}");
        assert_eq!(v["algorithm_conflict"], Value::Null);
        let text = plan.launch(&[&cuda[..], &["--dry-run"]].concat(), &[]);
        let row = text.lines().find(|line| line.contains("NCCL_ALGO")).unwrap();
        assert!(row.contains(value) && row.contains("tags every all-reduce over NCCL"), "{row}");
        let commands = plan.launch(&cuda, &[]);
        assert_eq!(commands.matches(&format!(" NCCL_ALGO={value} ")).count(), 4, "{commands}");
        // A value of the user stays.
        let v = plan.launch_json(&cuda, &[("NCCL_ALGO", "Tree")]);
        assert_eq!(algorithm(&v["ranks"][3]), Some(["Tree".to_string(), "kept".to_string()]));
        // Peer memory carries the sums of one host, unless the plan requests NCCL, and CPUs use neither.
        let one = ["--hosts", "a", "--device", "cuda"];
        assert_eq!(algorithm(&plan.launch_json(&one, &[])["ranks"][0]), None);
        assert_eq!(algorithm(&plan.launch_json(&["--hosts", "a,b"], &[])["ranks"][0]), None);
        assert_eq!(algorithm(&tagged_plan("nccl", threshold).launch_json(&one, &[])["ranks"][0]), set(value));
    }
}

#[test]
fn nccl_chooses_if_the_tags_of_a_plan_differ() {
    // A chunk of the demo has sums of square sums and of rows: small ones and large ones.
    let plan = tagged_plan("best", 4096);
    let cuda = ["--hosts", "a,b", "--device", "cuda"];
    let text = plan.launch(&[&cuda[..], &["--dry-run"]].concat(), &[]);
    let lines: Vec<&str> = text.lines().filter(|line| line.contains("NCCL_ALGO")).collect();
    let [line] = lines[..] else { panic!("{text}") };
    assert!(line.contains("NCCL_ALGO is not set, and NCCL chooses: the plan tags "), "{line}");
    assert!(line.contains("one algorithm per function and not per size"), "{line}");
    let v = plan.launch_json(&cuda, &[]);
    assert!(v["algorithm_conflict"].as_str().unwrap().contains(" tree and "), "{v:#}");
    assert!(!plan.launch(&cuda, &[]).contains("NCCL_ALGO"));
    assert_eq!(plan.launch_json(&["--hosts", "a,b"], &[])["algorithm_conflict"], Value::Null);
}

#[test]
fn commands_set_the_variables_that_the_user_keeps_because_other_hosts_do_not_have_them() {
    let plan = PlanFolder::new(&[]);
    let text = plan.launch(&["--hosts", "a,b", "--device", "cuda"], &[("NCCL_SOCKET_IFNAME", "ib7")]);
    let commands: Vec<&str> = text.lines().filter(|l| l.starts_with("env ")).collect();
    assert_eq!(commands.len(), 4, "{text}");
    assert!(commands.iter().all(|c| c.contains(" NCCL_SOCKET_IFNAME=ib7 ")), "{text}");
}

#[test]
fn hosts_that_do_not_fit_are_refused() {
    let plan = PlanFolder::new(&[]);
    let path = plan.path();
    let launch = |more: &[&'static str]| [&["launch", "--dry-run", &path][..], more].concat();
    assert_ends_with(&launch(&["--hosts", "a,b,c"]), 1, &["T0066", "cannot be divided among 3 hosts"]);
    assert_ends_with(&launch(&["--hosts", "localhost,b"]), 1, &["T0066", "do not reach rank 0 at localhost"]);
    assert_ends_with(&launch(&["--hosts", "a:2,a:2"]), 2, &["T0065", "named twice"]);
    assert_ends_with(&launch(&["--hostfile", "/no/such/file"]), 1, &["/no/such/file"]);
    assert_ends_with(&launch(&[]), 2, &["--hosts"]);
}
