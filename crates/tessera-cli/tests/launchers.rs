//! Tests of streams that a launcher starts, with one process per rank and with one per host. The
//! variables are those of `srun`; all hosts are this one.

#![allow(clippy::unwrap_used, reason = "a test that cannot set itself up fails")]

mod support;

use std::fs;
use std::net::TcpListener;
use std::os::unix::fs::PermissionsExt;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use support::{both_outputs, json_field, repo_root, run_tessera, send_signal, to_text, wait_for_end};

/// Number of chunks of a stream that the test stops before its end.
const MANY_CHUNKS: &str = "5000";

/// A step of Slurm whose tasks are processes of this host.
struct Step {
    dir: tempfile::TempDir,
    port: u16,
    hosts: u32,
    tasks_per_host: u32,
}

impl Step {
    fn new(hosts: u32, tasks_per_host: u32) -> Step {
        let dir = tempfile::tempdir().unwrap();
        let secret = dir.path().join("secret");
        fs::write(&secret, b"0123456789abcdef0123456789abcdef").unwrap();
        fs::set_permissions(&secret, fs::Permissions::from_mode(0o600)).unwrap();
        let port = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port();
        Step { dir, port, hosts, tasks_per_host }
    }

    /// Starts a stream of the demo model as a task.
    fn start_task(&self, task: u32, arguments: &[&str]) -> Child {
        let mut c = self.task_command(task);
        c.args(["stream", "models/demo", "--format", "json"]);
        if !arguments.contains(&"--join-timeout") {
            c.args(["--join-timeout", "60"]);
        }
        c.arg("--out").arg(self.dir.path().join("out")).args(arguments).spawn().unwrap()
    }

    /// Returns a command of a task with the variables that `srun` sets.
    fn task_command(&self, task: u32) -> Command {
        let (tasks, host) = (self.hosts * self.tasks_per_host, task / self.tasks_per_host);
        let mut c = Command::new(env!("CARGO_BIN_EXE_tessera"));
        c.current_dir(repo_root());
        let variables = [
            ("SLURM_PROCID", task),
            ("SLURM_LOCALID", task % self.tasks_per_host),
            ("SLURM_NODEID", host),
            ("SLURM_STEP_ID", 0),
            ("SLURM_STEP_NUM_TASKS", tasks),
            ("SLURM_STEP_NUM_NODES", self.hosts),
        ];
        c.envs(variables.map(|(name, value)| (name, value.to_string())));
        c.env("SLURM_STEP_NODELIST", format!("node[01-{:02}]", self.hosts));
        c.env("SLURM_STEP_TASKS_PER_NODE", format!("{}(x{})", self.tasks_per_host, self.hosts));
        c.env("MASTER_ADDR", "127.0.0.1").env("MASTER_PORT", self.port.to_string());
        c.env("TESSERA_SECRET_FILE", self.dir.path().join("secret"));
        c.stdout(Stdio::piped()).stderr(Stdio::piped());
        c
    }

    fn start_all(&self, arguments: &[&str]) -> Vec<Child> {
        (0..self.hosts * self.tasks_per_host).map(|task| self.start_task(task, arguments)).collect()
    }

    /// Waits until the run has written output.
    fn wait_for_output(&self) {
        let begun = Instant::now();
        let record = self.dir.path().join("out/record.jsonl");
        while fs::read_to_string(&record).map_or(0, |r| r.lines().count()) < 4 {
            assert!(begun.elapsed() < Duration::from_secs(120), "no chunk came");
            std::thread::sleep(Duration::from_millis(20));
        }
    }

    /// Returns the ids of the processes of the step, found by the folder of their command lines.
    fn processes(&self) -> Vec<u32> {
        let mark = self.dir.path().join("out").to_str().unwrap().to_string();
        let ids = fs::read_dir("/proc").unwrap().flatten();
        let ids = ids.filter_map(|e| e.file_name().to_str()?.parse::<u32>().ok());
        let command = |id: &u32| fs::read(format!("/proc/{id}/cmdline")).unwrap_or_default();
        ids.filter(|id| to_text(&command(id)).contains(&mark)).collect()
    }
}

fn golden_of_spawned_ranks(mesh: &str) -> String {
    let dir = tempfile::tempdir().unwrap();
    let out = dir.path().join("out");
    let arguments = ["--chunks", "2", "--quiet", "--oversubscribe", "--format", "json"];
    let base = ["stream", "models/demo", "--mesh", mesh, "--out", out.to_str().unwrap()];
    let o = run_tessera(&[&base[..], &arguments].concat());
    assert_eq!(o.status.code(), Some(0), "{}", both_outputs(&o));
    json_field(&to_text(&o.stdout), "golden")
}

#[test]
fn tasks_of_a_step_are_ranks_or_hosts_with_ranks() {
    let golden = golden_of_spawned_ranks("tp=2,pp=2");
    for (hosts, tasks_per_host) in [(2, 2), (2, 1)] {
        let step = Step::new(hosts, tasks_per_host);
        let tasks = step.start_all(&["--mesh", "tp=2,pp=2", "--chunks", "2"]);
        let outputs: Vec<_> = tasks.into_iter().map(wait_for_end).collect();
        for o in &outputs {
            assert_eq!(o.status.code(), Some(0), "{hosts} hosts: {}", both_outputs(o));
        }
        assert_eq!(json_field(&to_text(&outputs[0].stdout), "golden"), golden, "{hosts} hosts");
        let said = to_text(&outputs[0].stderr);
        assert!(said.contains("Slurm: process 0 of") && said.contains("SLURM_STEP_ID=0"), "{said}");
        assert!(outputs[1..].iter().all(|o| o.stdout.is_empty()), "only rank 0 reports");
    }
}

#[test]
fn a_killed_host_process_takes_its_ranks_along_and_ends_the_others() {
    let step = Step::new(2, 1);
    let mut tasks = step.start_all(&["--mesh", "tp=2,pp=2", "--chunks", MANY_CHUNKS, "--quiet"]);
    step.wait_for_output();
    assert_eq!(step.processes().len(), 6, "two host processes and four ranks");
    tasks[1].kill().unwrap();
    tasks[1].wait().unwrap();
    let zero = wait_for_end(tasks.remove(0));
    assert!(matches!(zero.status.code(), Some(10..30)), "{:?} {}", zero.status, both_outputs(&zero));
    assert!(to_text(&zero.stderr).contains("of this host failed first"), "{}", both_outputs(&zero));
    let begun = Instant::now();
    while !step.processes().is_empty() {
        assert!(begun.elapsed() < Duration::from_secs(10), "left: {:?}", step.processes());
        std::thread::sleep(Duration::from_millis(20));
    }
}

#[test]
fn a_stop_request_to_the_processes_of_all_hosts_ends_at_a_chunk() {
    // Open MPI signals the processes that it started, and Slurm those and their ranks.
    for reaches_ranks in [false, true] {
        let step = Step::new(2, 1);
        let tasks = step.start_all(&["--mesh", "tp=2,pp=2", "--chunks", MANY_CHUNKS, "--quiet"]);
        step.wait_for_output();
        let started: Vec<u32> = tasks.iter().map(Child::id).collect();
        let signalled = if reaches_ranks { step.processes() } else { started };
        signalled.into_iter().for_each(|process| send_signal(process, "TERM"));
        let outputs: Vec<_> = tasks.into_iter().map(wait_for_end).collect();
        let status: Vec<_> = outputs.iter().map(|o| o.status.code()).collect();
        assert_eq!(status, [Some(130), Some(0)], "{}", outputs.iter().map(both_outputs).collect::<String>());
        let record = fs::read_to_string(step.dir.path().join("out/record.jsonl")).unwrap();
        assert!(record.lines().last().unwrap().contains("interrupted"), "{record}");
    }
}

#[test]
fn ranks_that_cannot_be_divided_are_refused_on_every_task() {
    let step = Step::new(3, 1);
    for task in step.start_all(&["--mesh", "tp=2,pp=2", "--chunks", "2"]) {
        let o = wait_for_end(task);
        assert_eq!(o.status.code(), Some(2), "{}", both_outputs(&o));
        assert!(both_outputs(&o).contains("T0068"), "{}", both_outputs(&o));
    }
    assert!(!step.dir.path().join("out").exists());
}

#[test]
fn a_failure_to_meet_says_which_variables_were_read() {
    let step = Step::new(2, 1);
    // The leader's task never starts.
    let o = wait_for_end(step.start_task(1, &["--mesh", "tp=2", "--chunks", "2", "--join-timeout", "1"]));
    let said = both_outputs(&o);
    assert_eq!(o.status.code(), Some(1), "{said}");
    assert!(said.contains("T0758") && said.contains("SLURM_STEP_NODELIST=node[01-02]"), "{said}");
}

/// A rehearsal of a rack: the plan of the 14B model for 72 ranks, on 18 hosts with one process each.
#[test]
fn a_rack_of_18_hosts_meets_and_simulates_its_plan() {
    let step = Step::new(18, 1);
    let plan = step.dir.path().join("plan");
    let plan = plan.to_str().unwrap();
    let planned = run_tessera(&["plan", "models/wan2.1-14b", "--mesh", "tp=8,pp=9", "--out", plan]);
    assert_eq!(planned.status.code(), Some(0), "{}", both_outputs(&planned));
    let tasks: Vec<Child> = (0..18)
        .map(|task| {
            let mut c = step.task_command(task);
            c.args(["stream", "--plan", plan, "--device", "sim", "--chunks", "3", "--format", "json"]);
            c.arg("--out").arg(step.dir.path().join("out")).spawn().unwrap()
        })
        .collect();
    let outputs: Vec<_> = tasks.into_iter().map(wait_for_end).collect();
    for o in &outputs {
        assert_eq!(o.status.code(), Some(0), "{}", both_outputs(o));
    }
    assert_eq!(json_field(&to_text(&outputs[0].stdout), "chunks"), "3");
    let said = to_text(&outputs[0].stderr);
    assert!(said.contains("host 0 of 18") && said.contains("all 72 ranks have joined"), "{said}");
    assert!(step.dir.path().join("out/record.jsonl").exists());
}

#[test]
fn a_rehearsal_finds_the_host_with_another_plan() {
    let step = Step::new(2, 1);
    let tasks: Vec<Child> = [(0, "1000,750,500"), (1, "1000,500")]
        .map(|(task, steps)| {
            step.start_task(
                task,
                &["--mesh", "tp=2,pp=2", "--device", "sim", "--chunks", "2", "--steps", steps],
            )
        })
        .into();
    for o in tasks.into_iter().map(wait_for_end) {
        assert_eq!(o.status.code(), Some(13), "{}", both_outputs(&o));
        assert!(both_outputs(&o).contains("plan digest"), "{}", both_outputs(&o));
    }
    assert!(!step.dir.path().join("out").exists());
}
