//! The settings of a model that clients change: lists of denoise steps, the bias of the context, and LoRAs.

use std::path::Path;

use safetensors::tensor::{Dtype, TensorView};
use serde_json::{Value, json};
use tessera::{LoraFile, Model, Overrides};
use tessera_serve::{LoraChoice, ServeOptions, ServedStream};

use crate::client::SocketClient;
use crate::{TestServer, demo_folder, serve_model, test_options};

/// The demo model with a recomputed context and a LoRA.
fn adjustable_stream(dir: &Path) -> ServedStream {
    let overrides = Overrides { recompute: Some(true), ..Overrides::default() };
    let model = Model::open(&demo_folder(), &overrides).unwrap();
    let path = dir.join("sketch.safetensors");
    write_lora(&path, model.video.wan.dim as usize);
    let sketch = LoraChoice { name: "sketch".into(), file: LoraFile { path, strength: 0.5 } };
    ServedStream { loras: vec![sketch], ..serve_model(model, "tp=2") }
}

/// Writes a LoRA of rank 1 for a square matrix of the generator, whose update has equal elements.
fn write_lora(path: &Path, dim: usize) {
    let factor = 0.05_f32.to_le_bytes().repeat(dim);
    let view = |shape: [usize; 2]| TensorView::new(Dtype::F32, shape.to_vec(), &factor).unwrap();
    let factors = [
        ("blocks.0.self_attn.q.lora_A.weight", view([1, dim])),
        ("blocks.0.self_attn.q.lora_B.weight", view([dim, 1])),
    ];
    std::fs::write(path, safetensors::serialize(factors, None).unwrap()).unwrap();
}

fn options_in(dir: &Path, name: &str, resume: Option<&str>) -> ServeOptions {
    ServeOptions {
        out: Some(dir.join(name)),
        resume: resume.map(|folder| dir.join(folder)),
        ..test_options()
    }
}

/// Requests a change, and returns the first request with it.
fn change(client: &mut SocketClient, what: Value) -> u64 {
    let id = client.change(what);
    client.wait_until("effect", |effect| effect["id"] == id)["request"].as_u64().unwrap()
}

pub(crate) fn a_client_changes_what_the_plan_and_the_server_admit() {
    let dir = tempfile::tempdir().unwrap();
    let server =
        TestServer::start_stream(adjustable_stream(dir.path()), options_in(dir.path(), "first", None));
    let mut client = SocketClient::join_in_control(server.at.address);
    let facts = &client.hello["stream"];
    assert_eq!(facts["step_lists"], json!(["default", "fast"]));
    assert_eq!(
        (&facts["loras"], &facts["reads_bias"], &facts["bias"]),
        (&json!(["sketch"]), &json!(true), &json!(1.0))
    );
    client.wait_for_frame(|_| true);
    for (what, code) in [
        (json!({ "steps": "slow" }), "T0054"),
        (json!({ "bias": 2 }), "T0054"),
        (json!({ "lora": "oil" }), "T1616"),
    ] {
        let id = client.change(what);
        let refused = client.wait_for("refused");
        assert_eq!((refused["id"].as_u64(), refused["code"].as_str()), (Some(id), Some(code)));
    }
    change(&mut client, json!({ "steps": "fast" }));
    change(&mut client, json!({ "bias": 0.25 }));
    let styled = change(&mut client, json!({ "lora": "sketch" }));
    let status = client.wait_until("status", |status| status["request"].as_u64() >= Some(styled));
    assert_eq!(
        (&status["steps"], &status["bias"], &status["lora"]),
        (&json!("fast"), &json!(0.25), &json!("sketch"))
    );
    let phases = status["phases"].as_array().unwrap();
    let steps = phases.iter().filter(|phase| phase[0].as_str().unwrap().starts_with("denoise")).count();
    assert_eq!(steps, 2, "{phases:?}");
    let plain = change(&mut client, json!({ "lora": null }));
    let status = client.wait_until("status", |status| status["request"].as_u64() >= Some(plain + 1));
    assert_eq!((&status["steps"], &status["lora"]), (&json!("fast"), &Value::Null));
    drop(client);
    drop(server);

    // Another server generates every chunk again with the same settings, or its digests would differ.
    let options = options_in(dir.path(), "second", Some("first/run-1"));
    let server = TestServer::start_stream(adjustable_stream(dir.path()), options);
    let mut client = SocketClient::join_in_control(server.at.address);
    client.wait_for_frame(|_| true);
    let status = client.wait_until("status", |status| status["state"] == "running");
    assert_eq!(
        (&status["steps"], &status["bias"], &status["lora"]),
        (&json!("fast"), &json!(0.25), &Value::Null)
    );
}

pub(crate) fn a_lora_that_cannot_be_read_ends_the_server_before_it_starts() {
    let dir = tempfile::tempdir().unwrap();
    let mut stream = adjustable_stream(dir.path());
    stream.loras.push(stream.loras[0].clone());
    let start = |stream| {
        let stop = tessera::StopHandle::default();
        tessera_serve::serve(stream, test_options(), &stop, &mut |_| panic!("the server is reached"))
            .unwrap_err()
    };
    assert_eq!(start(stream)[0].code.id, "T1609");
    let mut stream = adjustable_stream(dir.path());
    let absent = dir.path().join("absent.safetensors");
    stream.loras[0].file.path.clone_from(&absent);
    let refused = start(stream);
    let [d] = &refused[..] else { panic!("{refused:?}") };
    assert_eq!((d.code.id, d.message.as_str()), ("T0508", "cannot read the file"));
    let label = (d.labels[0].location.as_str(), d.labels[0].message.as_str());
    assert_eq!(label, (absent.to_str().unwrap(), "No such file or directory (os error 2)"));
}
