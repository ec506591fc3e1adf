//! Serialises a planning query as JSON, including the complete machine, so that a folder alone
//! suffices to repeat the query.

use std::path::{Path, PathBuf};

use serde_json::{Value, json};
use tessera_base::{Diagnostic, Diagnostics, Nanoseconds};
use tessera_cost::moe::Routing;
use tessera_cost::{MachineModel, Profile};
use tessera_mesh::Cluster;
use tessera_plan::search::thresholds::Thresholds;
use tessera_plan::search::{Job, Objective, Pins};

use tessera::files::read_text;

use crate::codes::T0051;
use crate::query::{LanguageQuery, ModelSource};

/// Reads the query from a folder of `tessera plan --out`.
///
/// # Errors
/// T0051.
pub fn read_query(folder: &Path) -> Result<LanguageQuery, Diagnostics> {
    let (file, v) = read_estimate_json(folder)?;
    query_from_json(&file, &v["query"])
}

/// Reads the machine from the estimate beside a sealed plan, if there is one.
pub fn read_planned_machine(folder: &Path) -> Option<Result<MachineModel, Diagnostics>> {
    folder.join("estimate.json").is_file().then(|| {
        let (file, v) = read_estimate_json(folder)?;
        machine_from_json(&file, &v["query"]["machine"])
    })
}

/// Converts a machine to JSON: the texts of its cluster file and of its profile file.
pub(crate) fn machine_to_json(m: &MachineModel) -> Value {
    json!({"cluster": m.cluster.to_toml(), "profile": m.profile.to_toml()})
}

/// Converts a query for a language model to JSON.
pub(crate) fn query_to_json(a: &LanguageQuery) -> Value {
    let subject = match &a.model_source {
        ModelSource::Zoo(name) => json!({"zoo": name}),
        ModelSource::Config(path) => json!({"config": path.display().to_string()}),
        ModelSource::Recipe(name) => json!({"recipe": name}),
    };
    let job = a.job.map(|j| match j {
        Job::Train { batch, sequence } => json!({"kind": "train", "batch": batch, "tokens": sequence}),
        Job::Prefill { batch, sequence } => json!({"kind": "prefill", "batch": batch, "tokens": sequence}),
        Job::Decode { batch, context } => json!({"kind": "decode", "batch": batch, "tokens": context}),
    });
    let objective = a.objective.map(|o| match o {
        Objective::Latency => json!("latency"),
        Objective::Throughput => json!("throughput"),
        Objective::Memory => json!("memory"),
        Objective::Deadline(ns) => json!({"deadline_ns": ns.0}),
    });
    json!({
        "subject": subject,
        "machine": machine_to_json(&a.machine),
        "devices": a.devices,
        "job": job,
        "objective": objective,
        "pins": a.pins.to_text(),
        "routing": a.routing.map(Routing::name),
        "prefetch_hit_rate": a.prefetch_hit_rate,
        "strict": a.strict,
        "limits": a.limits.to_toml(),
    })
}

/// Parses a machine from the TOML texts under the keys `cluster` and `profile`. Diagnostics refer
/// to the source as `file`.
fn machine_from_json(file: &str, v: &Value) -> Result<MachineModel, Diagnostics> {
    let text = |key: &str| v[key].as_str().ok_or_else(|| vec![missing_key(file, key)]);
    let cluster = Cluster::parse(file, text("cluster")?)?;
    Ok(MachineModel::new(cluster, Profile::parse(file, text("profile")?)?))
}

/// Reads a query. Keys that are missing or null stay `None`.
fn query_from_json(file: &str, v: &Value) -> Result<LanguageQuery, Diagnostics> {
    let lacks = |key: &str| vec![missing_key(file, key)];
    let given = |key: &str| Some(&v[key]).filter(|x| !x.is_null());
    let name = |key: &str| v["subject"][key].as_str().map(str::to_string);
    let subject = name("zoo")
        .map(ModelSource::Zoo)
        .or(name("recipe").map(ModelSource::Recipe))
        .or(name("config").map(|p| ModelSource::Config(PathBuf::from(p))))
        .ok_or_else(|| lacks("subject"))?;
    let job = given("job").map(|j| {
        let (batch, tokens) = (j["batch"].as_u64()?, j["tokens"].as_u64()?);
        match j["kind"].as_str()? {
            "train" => Some(Job::Train { batch, sequence: tokens }),
            "prefill" => Some(Job::Prefill { batch, sequence: tokens }),
            "decode" => Some(Job::Decode { batch, context: tokens }),
            _ => None,
        }
    });
    let objective = given("objective").map(|o| match (o.as_str(), o["deadline_ns"].as_u64()) {
        (Some("latency"), _) => Some(Objective::Latency),
        (Some("throughput"), _) => Some(Objective::Throughput),
        (Some("memory"), _) => Some(Objective::Memory),
        (_, Some(ns)) => Some(Objective::Deadline(Nanoseconds(ns))),
        _ => None,
    });
    let devices = given("devices").map(|d| d.as_u64().and_then(|d| u32::try_from(d).ok()));
    let routing = given("routing").map(|r| r.as_str().and_then(Routing::from_name));
    let prefetch_hit_rate = given("prefetch_hit_rate").map(Value::as_f64);
    // A key with an invalid value is an error; a missing key is not.
    let invalid = |key: &'static str| move || lacks(key);
    Ok(LanguageQuery {
        model_source: subject,
        machine: machine_from_json(file, &v["machine"])?,
        devices: devices.map(|d| d.ok_or_else(invalid("devices"))).transpose()?,
        job: job.map(|j| j.ok_or_else(invalid("job"))).transpose()?,
        objective: objective.map(|o| o.ok_or_else(invalid("objective"))).transpose()?,
        pins: Pins::parse(v["pins"].as_str().ok_or_else(invalid("pins"))?)?,
        routing: routing.map(|r| r.ok_or_else(invalid("routing"))).transpose()?,
        prefetch_hit_rate: prefetch_hit_rate
            .map(|f| f.ok_or_else(invalid("prefetch_hit_rate")))
            .transpose()?,
        strict: v["strict"].as_bool().unwrap_or(false),
        limits: Thresholds::parse(file, v["limits"].as_str().ok_or_else(invalid("limits"))?)?,
        command: String::new(),
    })
}

fn read_estimate_json(folder: &Path) -> Result<(String, serde_json::Value), Diagnostics> {
    let path = folder.join("estimate.json");
    let file = path.display().to_string();
    let text = read_text(&path, &T0051).map_err(|d| vec![d])?;
    let v: serde_json::Value = serde_json::from_str(&text).map_err(|e| {
        vec![
            Diagnostic::error(&T0051, format!("{file} is not valid JSON: {e}"))
                .with_label(file.clone(), "this file"),
        ]
    })?;
    if v.get("query").is_none() && v.get("asked").is_some() {
        return Err(vec![
            Diagnostic::error(&T0051, format!("{file} was written by an older build"))
                .with_label(file.clone(), "`asked` is now `query`")
                .with_hint("create it again with `tessera plan --out`"),
        ]);
    }
    Ok((file, v))
}

fn missing_key(file: &str, key: &str) -> Diagnostic {
    Diagnostic::error(&T0051, format!("{file} does not contain the query"))
        .with_label(file.to_string(), format!("`{key}` is missing or invalid"))
        .with_hint("create it again with `tessera plan --out`")
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;
    use tessera_mesh::catalog;

    fn sample_query() -> LanguageQuery {
        LanguageQuery {
            model_source: ModelSource::Recipe("sr-moe".into()),
            machine: MachineModel::new(
                catalog::get("gb200-nvl72").unwrap().with_racks(2),
                Profile::builtin("ideal").unwrap(),
            ),
            devices: Some(144),
            job: Some(Job::Train { batch: 64, sequence: 4096 }),
            objective: Some(Objective::Deadline(Nanoseconds(40_000_000))),
            pins: Pins::parse("tp=8,capacity_pct=125").unwrap_or_default(),
            routing: Some(Routing::PowerLaw(1.2)),
            prefetch_hit_rate: Some(0.8),
            strict: true,
            limits: Thresholds::default(),
            command: "tessera".into(),
        }
    }

    #[test]
    fn query_round_trips_through_json() {
        let (was, text) = (sample_query(), query_to_json(&sample_query()).to_string());
        let again = query_from_json("e", &serde_json::from_str(&text).unwrap()).unwrap();
        assert_eq!(again.machine, was.machine);
        assert_eq!((again.model_source, again.devices, again.job), (was.model_source, was.devices, was.job));
        assert_eq!((again.objective, again.pins, again.routing), (was.objective, was.pins, was.routing));
        assert_eq!(
            (again.prefetch_hit_rate, again.strict, again.limits),
            (was.prefetch_hit_rate, was.strict, was.limits)
        );
    }

    #[test]
    fn null_stays_none_and_invalid_values_are_rejected() {
        let mut a = sample_query();
        (a.devices, a.job, a.objective, a.routing) = (None, None, None, None);
        let again = query_from_json("e", &query_to_json(&a)).unwrap();
        assert!(
            again.devices.is_none()
                && again.job.is_none()
                && again.objective.is_none()
                && again.routing.is_none()
        );
        for (key, wrong) in [
            ("job", json!({"kind": "sleep"})),
            ("routing", json!("w9")),
            ("devices", json!(-1)),
            ("prefetch_hit_rate", json!("all")),
        ] {
            let mut v = query_to_json(&a);
            v[key] = wrong;
            let ds = query_from_json("e", &v).unwrap_err();
            assert_eq!(ds[0].code.id, "T0051");
            assert!(format!("{ds:?}").contains(key), "{ds:?}");
        }
        assert!(query_from_json("e", &json!({"model": "older"})).is_err());
    }
}
