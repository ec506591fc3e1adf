//! Tests of the subcommands on valid and invalid input: their output and exit status.

#![allow(clippy::unwrap_used, reason = "a test that cannot set itself up fails")]

mod support;

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};

use tempfile::TempDir;

use support::repo_root;

fn fixture_path(name: &str) -> String {
    repo_root().join("fixtures").join(name).display().to_string()
}

/// Runs the binary in a folder.
fn tessera_in(dir: &Path, args: &[&str]) -> Output {
    Command::new(env!("CARGO_BIN_EXE_tessera")).current_dir(dir).args(args).output().unwrap()
}

fn run_tessera(args: &[&str]) -> Output {
    tessera_in(&repo_root(), args)
}

fn stdout(o: &Output) -> String {
    String::from_utf8(o.stdout.clone()).unwrap()
}

fn stderr(o: &Output) -> String {
    String::from_utf8(o.stderr.clone()).unwrap()
}

/// Checks that the command fails with a status and with all these words on standard error.
#[track_caller]
fn assert_fails(args: &[&str], status: i32, words: &[&str]) -> Output {
    let o = run_tessera(args);
    assert_failed(&o, status, words);
    o
}

#[track_caller]
fn assert_failed(o: &Output, status: i32, words: &[&str]) {
    let text = stderr(o);
    assert_eq!(o.status.code(), Some(status), "{text}");
    for w in words {
        assert!(text.contains(w), "no `{w}` in:\n{text}");
    }
}

#[track_caller]
fn success_stdout(o: &Output) -> String {
    assert_eq!(o.status.code(), Some(0), "{}", stderr(o));
    stdout(o)
}

/// Copies a fixture, so that a test may damage it.
fn copy_fixture(name: &str, dir: &TempDir) -> PathBuf {
    let to = dir.path().join(name);
    fs::create_dir(&to).unwrap();
    for e in fs::read_dir(fixture_path(name)).unwrap() {
        let from = e.unwrap().path();
        if from.is_file() {
            fs::write(to.join(from.file_name().unwrap()), fs::read(&from).unwrap()).unwrap();
        }
    }
    to
}

fn path_text(p: &Path) -> &str {
    p.to_str().unwrap()
}

#[test]
fn three_processes_name_one_plan_by_one_digest() {
    let digest = |_| {
        let text = success_stdout(&run_tessera(&[
            "plan",
            "fixtures/wan-odd",
            "--mesh",
            "tp=2,pp=2",
            "--format",
            "json",
        ]));
        let at = text.find("\"digest\":\"").unwrap() + 10;
        text[at..at + 64].to_string()
    };
    let all: Vec<String> = (0..3).map(digest).collect();
    assert!(all[0].bytes().all(|b| b.is_ascii_hexdigit()));
    assert!(all.iter().all(|d| *d == all[0]), "{all:?}");
}

#[test]
fn a_plan_is_summarized_saved_and_checked() {
    let dir = tempfile::tempdir().unwrap();
    let folder = dir.path().join("plan");
    let text = success_stdout(&run_tessera(&[
        "plan",
        "fixtures/wan-odd",
        "--mesh",
        "tp=2",
        "--out",
        path_text(&folder),
    ]));
    for words in
        ["tp=2", "2 ranks", "ulysses", "all_to_all", "rank0", "resident", "KiB", "denoise.fill3", "digest"]
    {
        assert!(text.contains(words), "no `{words}` in:\n{text}");
    }
    let digest = text.lines().find_map(|l| l.trim().strip_prefix("digest")).unwrap().trim().to_string();
    let checked = success_stdout(&run_tessera(&["check", path_text(&folder)]));
    assert_eq!(checked, format!("{}: verified, digest {digest}\n", folder.display()));
    assert_fails(
        &["plan", "fixtures/wan-odd", "--out", path_text(&folder)],
        1,
        &["T0013", "hint: name another folder"],
    );
    // The mapping of the sealed plan yields the same plan again.
    let mapping = folder.join("mapping.toml");
    let again = success_stdout(&run_tessera(&["plan", "fixtures/wan-odd", "--mapping", path_text(&mapping)]));
    assert!(again.contains(&digest));

    let file = folder.join("stream.toml");
    let edited = fs::read_to_string(&file).unwrap().replace("fps = 24.0", "fps = 25.0");
    fs::write(&file, edited).unwrap();
    assert_fails(
        &["check", path_text(&folder)],
        1,
        &["T0012", &digest, "plan again", "tessera explain T0012"],
    );
    assert_fails(&["stream", "--plan", path_text(&folder)], 1, &["T0012"]);
}

#[test]
fn a_leader_outside_the_mesh_is_in_the_plan() {
    let dir = tempfile::tempdir().unwrap();
    let folder = dir.path().join("plan");
    let asked = ["plan", "models/demo", "--mesh", "tp=2", "--topology", "pp1", "--out", path_text(&folder)];
    let text = success_stdout(&run_tessera(&asked));
    for words in ["tp=2, outside=1: 3 ranks", "pp1: rank 0 leads", "outside", "leader@out0"] {
        assert!(text.contains(words), "no `{words}` in:\n{text}");
    }
    assert!(fs::read_to_string(folder.join("mapping.toml")).unwrap().contains("topology = \"pp1\""));
    success_stdout(&run_tessera(&["check", path_text(&folder)]));
    // The mapping file records the topology, and an option overrides it.
    let mapping = folder.join("mapping.toml");
    let again = ["plan", "models/demo", "--mapping", path_text(&mapping), "--format", "json"];
    assert!(success_stdout(&run_tessera(&again)).contains("\"topology\":\"pp1\""));
    let back = success_stdout(&run_tessera(&[&again[..], &["--topology", "mesh"]].concat()));
    assert!(back.contains("\"topology\":\"mesh\"") && back.contains("\"mesh\":\"tp=2\""));
}

#[test]
fn a_published_checkpoint_is_described_and_planned_under_a_preset() {
    let dir = tempfile::tempdir().unwrap();
    let folder = path_text(dir.path());
    fs::copy(fixture_path("torch-checkpoints/self_forcing.pt"), dir.path().join("self_forcing_dmd.pt"))
        .unwrap();
    let config = r#"{"dim":12,"ffn_dim":8,"freq_dim":16,"in_dim":4,"out_dim":4,"num_heads":1,"num_layers":1,
        "text_dim":20,"text_len":7}"#;
    fs::write(dir.path().join("config.json"), config).unwrap();
    let o = run_tessera(&["models", "inspect", folder, "--json"]);
    assert_eq!(o.status.code(), Some(1), "{}", stderr(&o));
    let report: serde_json::Value = serde_json::from_str(&stdout(&o)).unwrap();
    assert_eq!(report["parts"][0]["prefix"], "generator_ema.model.");
    assert_eq!(report["parts"][0]["tensors"], 42);
    assert_eq!(report["missing"], serde_json::json!(["VAE", "text encoder", "tokenizer"]));
    assert_fails(&["plan", folder], 1, &["T0076", "--preset", "models inspect"]);
    let settings = dir.path().join("settings.toml");
    let small = "preset = \"self-forcing\"\n[video]\nwidth = 160\nheight = 96\n\
                 [text]\nencoder = \"none\"\n[decoder]\nkind = \"none\"\n";
    fs::write(&settings, small).unwrap();
    let text = success_stdout(&run_tessera(&["plan", folder, "--stream", path_text(&settings)]));
    assert!(text.contains("digest") && text.contains("160"), "{text}");
    let demo = success_stdout(&run_tessera(&["models", "inspect", "models/demo"]));
    assert!(demo.contains("next: tessera stream models/demo\n"), "{demo}");
}

#[test]
fn bad_models_are_rejected_with_the_file_name() {
    assert_fails(&["plan", "no/such/model"], 2, &["T0010", "no/such/model", "models/demo"]);
    assert_fails(&["stream", "no/such/model"], 2, &["T0010", "no/such/model", "models/demo"]);
    assert_fails(&["plan"], 2, &["T0031", "models/demo"]);
    assert_fails(&["stream"], 2, &["T0031", "models/demo"]);

    let dir = tempfile::tempdir().unwrap();
    let model = copy_fixture("wan-odd", &dir);
    let config = model.join("config.json");
    fs::write(&config, fs::read_to_string(&config).unwrap().replace("\"eps\"", "\"epps\"")).unwrap();
    assert_fails(&["plan", path_text(&model)], 1, &["T0002", "epps", "did you mean `eps`?", "config.json"]);
}

#[test]
fn truncated_weights_are_found_before_anything_starts() {
    let dir = tempfile::tempdir().unwrap();
    let model = copy_fixture("wan-odd", &dir);
    let file = model.join("model.safetensors");
    let bytes = fs::read(&file).unwrap();
    let out = dir.path().join("run");
    for keep in [0, 5, 1000, bytes.len() - 1] {
        fs::write(&file, &bytes[..keep]).unwrap();
        let o =
            run_tessera(&["stream", path_text(&model), "--prompt", "red square", "--out", path_text(&out)]);
        assert_failed(&o, 1, &["error[T05", "model.safetensors"]);
        assert!(!out.exists());
    }
}

#[test]
fn invalid_meshes_are_rejected() {
    assert_fails(&["plan", "fixtures/wan-odd", "--mesh", "mp=2"], 2, &["T0101", "tp, ep, pp or dp"]);
    assert_fails(&["plan", "fixtures/wan-odd", "--mesh", "tp"], 2, &["T0102", "tp=2,pp=2"]);
    assert_fails(&["plan", "fixtures/wan-odd", "--mesh", "tp=6"], 1, &["T0602", "5 heads"]);
    // Both errors are reported at once.
    assert_fails(
        &["plan", "fixtures/wan-odd", "--mesh", "tp=0", "--steps", "9,x"],
        2,
        &["T0102", "T0030", "`x`"],
    );
    assert_fails(
        &["plan", "fixtures/wan-odd", "--cluster", "laptop", "--steps", "9,x"],
        2,
        &["T0030", "`x`"],
    );
    assert_fails(
        &[
            "plan",
            "fixtures/wan-odd",
            "--cluster",
            "laptop",
            "--strategy",
            "megatron",
            "--pin",
            "strategy=ulysses",
        ],
        2,
        &["T0030", "strategy is given as ulysses and as megatron"],
    );
    assert_fails(&["plan", "fixtures/wan-odd", "--strategy", "ulises"], 2, &["ulysses"]);
    // A leader outside the mesh, and the mesh sizes that it allows.
    assert_fails(
        &["plan", "fixtures/wan-odd", "--topology", "pp1"],
        1,
        &["T0605", "1 rank", "pp0", "tp=2 or more"],
    );
    assert_fails(&["plan", "fixtures/wan-odd", "--mesh", "tp=2", "--topology", "pp0"], 1, &["T0605", "pp1"]);
    assert_fails(
        &["plan", "fixtures/wan-odd", "--mesh", "tp=2,outside=1"],
        1,
        &["T0605", "topology pp0 or pp1"],
    );
    assert_fails(&["plan", "fixtures/wan-odd", "--topology", "pp2"], 2, &["pp1"]);
    for command in ["plan", "stream"] {
        for flag in ["--d-in", "--d-out", "--max-outstanding"] {
            for depth in ["0", "65"] {
                assert_fails(&[command, "fixtures/wan-odd", flag, depth], 2, &[flag, "1..=64"]);
            }
        }
        for mesh in ["", " ", ","] {
            assert_fails(&[command, "fixtures/wan-odd", "--mesh", mesh], 2, &["--mesh", "such as tp=2"]);
        }
    }
    assert_fails(&["bench", "dit", "--mesh", ""], 2, &["--mesh", "such as tp=2"]);

    let cores = std::thread::available_parallelism().unwrap().get();
    let out = tempfile::tempdir().unwrap();
    let run = out.path().join("run");
    // The largest mesh that fits the model; a machine with enough cores runs it.
    if cores < 24 {
        let args = [
            "stream",
            "fixtures/wan-even",
            "--mesh",
            "tp=8,pp=3",
            "--prompt",
            "red",
            "--out",
            path_text(&run),
        ];
        assert_fails(&args, 1, &["T0015", "24 ranks", "--oversubscribe"]);
        // A leader outside the mesh only encodes and decodes.
        assert_fails(&[&args[..], &["--topology", "pp1"]].concat(), 1, &["T0015", "24 ranks", "outside=1"]);
        assert!(!run.exists());
    }
}

#[test]
fn invalid_prompts_and_changes_are_rejected() {
    let stream = |more: &[&str], status, words: &[&str]| {
        let args = [&["stream", "fixtures/wan-odd", "--out", "/nonexistent/run"], more].concat();
        assert_fails(&args, status, words);
    };
    stream(&["--prompt", ""], 1, &["T0420", "known words"]);
    stream(&["--prompt", "a red sqare"], 1, &["T0421", "did you mean `square`?"]);
    stream(&["--prompt", "red", "--at", "2:a blue"], 1, &["T0421", "blue"]);
    stream(&["--at", "a red square"], 2, &["T0030", "--at 4:'a blue square moves left'"]);
    stream(
        &["--at", "x:red", "--seed-at", "1:-1"],
        2,
        &["`x` is not a chunk number", "the seed is not a whole number"],
    );
    stream(&["--at", "1:red", "--at", "1:square"], 2, &["chunk 1 twice"]);
    stream(&["--prompt", "red", "--cut-at", "8"], 1, &["T0018", "chunk 8", "of 8"]);
    stream(&["--prompt", "red", "--chunks", "0"], 1, &["T0018"]);
    stream(&["--prompt", "red", "--cut-at", "3", "--flush-at", "3"], 1, &["T0018", "both cut and flushed"]);
    stream(&["--prompt", "red", "--flush-at", "9"], 1, &["T0018", "chunk 9"]);
    stream(&["--prompt", "red", "--weights-at", "3:no/such"], 1, &["T0010", "no/such"]);
    // Weights of other shapes.
    stream(&["--prompt", "red", "--weights-at", "3:models/demo"], 1, &["T05"]);
    stream(
        &["--weights-at", "no/such", "--flush-at", "1", "--flush-at", "1"],
        2,
        &["T0030", "chunk 1 twice"],
    );
    stream(&["--chunks", "-1"], 2, &["--chunks"]);
    stream(&["--plan", "p", "--mesh", "tp=2"], 2, &["T0030", "--mesh", "--plan"]);
    stream(&["--plan", "p", "--topology", "pp1"], 2, &["T0030", "--topology", "--plan"]);
    stream(&["--plan", "p", "--d-out", "4"], 2, &["T0030", "--d-out", "--plan"]);
    stream(&["--min-decode-ms", "60,x", "--min-generate-ms", "-1"], 2, &["T0030", "`x`", "`-1`"]);
    stream(&["--prompt", "red", "--cache", "recompute"], 1, &["T0016"]);
}

#[test]
fn an_output_folder_that_exists_is_left_alone() {
    let dir = tempfile::tempdir().unwrap();
    let out = path_text(dir.path());
    assert_fails(&["stream", "fixtures/wan-odd", "--prompt", "red", "--out", out], 1, &["T0013", out]);
    assert_eq!(fs::read_dir(out).unwrap().count(), 0);
}

/// Runs the binary in a shell with a limit on the file size, in blocks, which acts like a full
/// disk.
fn run_with_file_limit(blocks: u32, dir: &Path, args: &str) -> Output {
    let script = format!("ulimit -f {blocks}; exec '{}' {args}", env!("CARGO_BIN_EXE_tessera"));
    Command::new("sh").arg("-c").arg(script).current_dir(dir).output().unwrap()
}

#[test]
fn a_full_disk_is_reported_and_leaves_no_partial_plan() {
    let dir = tempfile::tempdir().unwrap();
    let model = fixture_path("wan-odd");
    for verb in ["plan", "stream --prompt red"] {
        let o = run_with_file_limit(1, dir.path(), &format!("{verb} --out there '{model}'"));
        assert_failed(&o, 1, &["T0014", "cannot be written"]);
        let left: Vec<_> = fs::read_dir(dir.path()).unwrap().collect();
        assert!(left.is_empty(), "{left:?}");
    }
    // The limit leaves room for the plan and for some chunks.
    let o = run_with_file_limit(
        150,
        dir.path(),
        &format!("stream --prompt red --chunks 200 --out there '{model}'"),
    );
    assert_failed(&o, 17, &["T0014", "failed[", "the output could not be delivered"]);
    assert!(fs::metadata(dir.path().join("there/latents.safetensors")).unwrap().len() > 4096);

    let full = Command::new("sh")
        .args(["-c", &format!("exec '{}' explain > /dev/full", env!("CARGO_BIN_EXE_tessera"))])
        .output()
        .unwrap();
    assert_failed(&full, 1, &["T0033", "standard output"]);
    // A place where no user can create a folder.
    assert_fails(
        &["plan", "fixtures/wan-odd", "--out", "/proc/nothing/plan"],
        1,
        &["T0014", "/proc/nothing"],
    );
}

#[test]
fn a_closed_pipe_is_not_an_error() {
    let script = format!("'{}' explain | head -1", env!("CARGO_BIN_EXE_tessera"));
    let o = Command::new("sh").args(["-c", &script]).output().unwrap();
    assert!(stderr(&o).is_empty() && stdout(&o).lines().count() == 1, "{}", stderr(&o));
}

#[test]
fn programs_are_checked_with_their_ranks() {
    let good = success_stdout(&run_tessera(&[
        "check",
        "filetests/check/pipeline.tir",
        "filetests/check/linear_pair.tir",
    ]));
    assert_eq!(good.matches("verified, digest ").count(), 2);
    let o = assert_fails(
        &["check", "filetests/check/opposite_orders.tir"],
        1,
        &["error[T0301]", "--> filetests/check/opposite_orders.tir:5:", "tessera explain T0301"],
    );
    assert!(stdout(&o).is_empty());

    let o = run_tessera(&["check", "--format", "github", "filetests/check/both_receive_first.tir"]);
    assert!(
        stdout(&o).starts_with("::error file=filetests/check/both_receive_first.tir,line=4,"),
        "{}",
        stdout(&o)
    );
    let o = run_tessera(&[
        "check",
        "--format",
        "json",
        "filetests/check/issue_without_wait.tir",
        "filetests/check/pipeline.tir",
    ]);
    assert_eq!(o.status.code(), Some(1));
    let lines: Vec<String> = stdout(&o).lines().map(str::to_string).collect();
    assert!(lines[0].starts_with("{\"code\":\"T0313\""), "{lines:?}");
    assert!(lines.last().unwrap().contains("\"verified\":true"), "{lines:?}");
    let fragment = "filetests/fragment/rs_mm_ag.tir";
    assert_fails(&["check", fragment], 1, &["T0215", "the dim that is scattered", "T0206", "%S_partial"]);
    assert_fails(&["check", "no/such.tir"], 1, &["T0025", "no/such.tir"]);
    assert_fails(&["check", "fixtures"], 1, &["T0020", "seal.json", "neither a plan nor a trace"]);
    assert_fails(&["check", "filetests/parse/empty.tir"], 1, &["T0025", "contains no program"]);
    // The file's header assigns ranks to roles.
    assert_fails(&["check", "filetests/verify/leader_has_a_mesh_role.tir"], 1, &["T0337"]);
    assert_fails(&["check"], 2, &["PATH"]);
}

#[test]
fn every_code_has_a_page_and_is_listed() {
    let list = success_stdout(&run_tessera(&["explain"]));
    let json = success_stdout(&run_tessera(&["explain", "--format", "json"]));
    assert!(json.lines().count() > 80, "{}", json.lines().count());
    for line in json.lines() {
        let id = line.split("\"code\":\"").nth(1).unwrap().split('"').next().unwrap();
        assert!(list.contains(&format!("  {id}  ")), "{id} is not in the list");
    }
    let page = success_stdout(&run_tessera(&["explain", "t0602"]));
    assert!(
        page.starts_with("T0602: tp or ep does not fit the model\n\n")
            && page.contains("Raised by: mappings"),
        "{page}"
    );
    assert_fails(&["explain", "T0603x"], 2, &["T0032", "T0603"]);
    assert_fails(&["explain", "E0308"], 2, &["T0032", "T0308"]);
}

#[test]
fn every_subcommand_has_help_with_examples() {
    for verb in ["plan", "check", "explain", "stream", "generate"] {
        let help = success_stdout(&run_tessera(&[verb, "--help"]));
        assert!(help.contains("Examples:\n  tessera ") && help.contains("Usage: tessera "), "{help}");
    }
    let help = success_stdout(&run_tessera(&["--help"]));
    assert!(
        !help.lines().any(|line| line.starts_with("  rank")),
        "the hidden subcommand `rank` is listed:\n{help}"
    );
    assert_fails(&["strem"], 2, &["stream"]);
}

// proves: P-13
#[test]
fn lint_finds_a_conditional_collective_and_certifies_nothing() {
    let dir = tempfile::tempdir().unwrap();
    let source =
        "import torch.distributed as dist\n\n\ndef save(rank):\n    if rank == 0:\n        dist.barrier()\n";
    fs::write(dir.path().join("save.py"), source).unwrap();
    let o = tessera_in(dir.path(), &["lint", "."]);
    assert_failed(&o, 1, &["error[T1435]", "--> ./save.py:6:9", "5 |     if rank == 0:"]);
    assert!(stdout(&o).contains("errors: 1, warnings: 0") && stdout(&o).contains("certifies nothing"));
    let o = tessera_in(dir.path(), &["lint", "save.py", "--format", "github"]);
    assert!(stdout(&o).starts_with("::error file=save.py,line=6,col=9,title=T1435::"), "{}", stdout(&o));
    let o = tessera_in(dir.path(), &["lint", "save.py", "--format", "json"]);
    assert!(stdout(&o).ends_with(
        "{\"certifies\":false,\"errors\":1,\"files\":1,\"omitted\":0,\"suppressed\":0,\"warnings\":0}\n"
    ));

    // Negative control: the barrier for all ranks, and the rule suppressed.
    fs::write(dir.path().join("save.py"), source.replace("    if rank == 0:\n        ", "    ")).unwrap();
    assert!(success_stdout(&tessera_in(dir.path(), &["lint", "."])).contains("errors: 0, warnings: 0"));
    fs::write(dir.path().join("save.py"), source.replace("()\n", "()  # tessera: ignore T1435\n")).unwrap();
    assert!(success_stdout(&tessera_in(dir.path(), &["lint", "."])).contains("suppressed by comments: 1"));
    assert_failed(&tessera_in(dir.path(), &["lint", "none.py"]), 2, &["T1430", "does not exist"]);
}

#[test]
fn serve_takes_its_trace_collector_from_the_flag_before_the_variables() {
    let serve = |flags: &[&str], variables: &[(&str, &str)]| {
        let mut command = Command::new(env!("CARGO_BIN_EXE_tessera"));
        // A lead of no chunks ends the command behind the check of the collector.
        command.current_dir(repo_root()).args(["serve", "--lead", "0"]).args(flags);
        for name in ["OTEL_EXPORTER_OTLP_ENDPOINT", "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_SDK_DISABLED"]
        {
            command.env_remove(name);
        }
        command.envs(variables.iter().copied()).output().unwrap()
    };
    let (base, whole) = ("OTEL_EXPORTER_OTLP_ENDPOINT", "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT");
    assert_failed(&serve(&["--otlp", "https://collector:4318"], &[]), 2, &["T1612", "TLS"]);
    assert_failed(&serve(&[], &[(base, "collector")]), 2, &["T1612", base]);
    assert_failed(&serve(&[], &[(base, "http://good"), (whole, "bad")]), 2, &["T1612", whole]);
    let good = "http://collector:4318";
    assert_failed(&serve(&["--otlp", good], &[(base, "bad")]), 2, &["T1609", "a lead of no chunks"]);
    let disabled = serve(&[], &[(base, "bad"), ("OTEL_SDK_DISABLED", "true")]);
    assert_failed(&disabled, 2, &["T1609", "a lead of no chunks"]);
}

#[test]
fn a_file_of_the_current_folder_does_not_replace_a_cluster_or_a_profile_of_its_name() {
    let dir = TempDir::new().unwrap();
    for name in ["laptop", "tessera"] {
        fs::write(dir.path().join(name), "no cluster and no profile").unwrap();
    }
    let plan = |cluster: &str, profile: &str| {
        let model = repo_root().join("models/demo").display().to_string();
        let args = ["plan", &model, "--cluster", cluster, "--profile", profile, "--devices", "1"];
        tessera_in(dir.path(), &args)
    };
    success_stdout(&plan("laptop", "tessera"));
    assert_failed(&plan("./laptop", "tessera"), 1, &["./laptop"]);
    assert_failed(&plan("laptop", "./tessera"), 1, &["./tessera"]);
}

#[test]
fn a_plan_with_a_relative_model_path_says_where_another_folder_looks_for_it() {
    let dir = TempDir::new().unwrap();
    let folder = dir.path().join("plan").display().to_string();
    success_stdout(&run_tessera(&["plan", "models/demo", "--out", &folder]));
    let o = tessera_in(dir.path(), &["stream", "--plan", &folder, "--chunks", "1", "--out", "run"]);
    let here = fs::canonicalize(dir.path()).unwrap();
    let looked_for = here.join("models/demo").display().to_string();
    let current = format!("the current folder {}", here.display());
    assert_failed(
        &o,
        1,
        &["T0010", "models/demo", &looked_for, &current, "tessera stream MODEL --plan PLAN"],
    );
}
