//! A question of planning as JSON, with the machine in full, so that it can be posed again from a folder alone.

use std::path::PathBuf;

use serde_json::{Value, json};
use tessera_base::{Diagnostic, Diagnostics, Nanoseconds};
use tessera_cost::moe::Routing;
use tessera_cost::{Machine, Profile};
use tessera_mesh::Cluster;
use tessera_plan::search::thresholds::Thresholds;
use tessera_plan::search::{Job, Objective, Pins};

use super::T0051;
use crate::search::{Asked, Subject};

/// A cluster and a profile as their files' texts.
pub(crate) fn machine_json(m: &Machine) -> Value {
    json!({"cluster": m.cluster.text(), "profile": m.profile.text()})
}

/// What was asked of a language model.
pub(crate) fn asked_json(a: &Asked) -> Value {
    let subject = match &a.subject {
        Subject::Zoo(name) => json!({"zoo": name}),
        Subject::Config(path) => json!({"config": path.display().to_string()}),
        Subject::Recipe(name) => json!({"recipe": name}),
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
        "machine": machine_json(&a.machine),
        "devices": a.devices,
        "job": job,
        "objective": objective,
        "pins": a.pins.text(),
        "routing": a.routing.map(Routing::name),
        "forecast": a.forecast,
        "strict": a.strict,
        "limits": a.limits.text(),
    })
}

/// The machine of an `estimate.json`.
pub(crate) fn machine_of(file: &str, v: &Value) -> Result<Machine, Diagnostics> {
    let text = |key: &str| v[key].as_str().ok_or_else(|| vec![lacks(file, key)]);
    let cluster = Cluster::parse(file, text("cluster")?)?;
    Ok(Machine::new(cluster, Profile::parse(file, text("profile")?)?))
}

/// The question again. Absent and null are left open, as they were.
pub(super) fn asked_of(file: &str, v: &Value) -> Result<Asked, Diagnostics> {
    let lacks = |key: &str| vec![lacks(file, key)];
    let given = |key: &str| Some(&v[key]).filter(|x| !x.is_null());
    let name = |key: &str| v["subject"][key].as_str().map(str::to_string);
    let subject = name("zoo")
        .map(Subject::Zoo)
        .or(name("recipe").map(Subject::Recipe))
        .or(name("config").map(|p| Subject::Config(PathBuf::from(p))))
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
    let routing = given("routing").map(|r| r.as_str().and_then(Routing::named));
    let forecast = given("forecast").map(Value::as_f64);
    // Given and not understood is not the same as not given.
    let whole = |key: &'static str| move || lacks(key);
    Ok(Asked {
        subject,
        machine: machine_of(file, &v["machine"])?,
        devices: devices.map(|d| d.ok_or_else(whole("devices"))).transpose()?,
        job: job.map(|j| j.ok_or_else(whole("job"))).transpose()?,
        objective: objective.map(|o| o.ok_or_else(whole("objective"))).transpose()?,
        pins: Pins::parse(v["pins"].as_str().ok_or_else(whole("pins"))?)?,
        routing: routing.map(|r| r.ok_or_else(whole("routing"))).transpose()?,
        forecast: forecast.map(|f| f.ok_or_else(whole("forecast"))).transpose()?,
        strict: v["strict"].as_bool().unwrap_or(false),
        limits: Thresholds::parse(file, v["limits"].as_str().ok_or_else(whole("limits"))?)?,
        command: String::new(),
    })
}

fn lacks(file: &str, key: &str) -> Diagnostic {
    Diagnostic::error(&T0051, format!("{file} does not hold what was asked"))
        .at(file.to_string(), format!("`{key}` is missing or not understood"))
        .hint("make it again with `tessera plan --out`")
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;
    use tessera_mesh::clusters;

    fn asked() -> Asked {
        Asked {
            subject: Subject::Recipe("sr-moe".into()),
            machine: Machine::new(
                clusters::named("gb200-nvl72").unwrap().with_racks(2),
                Profile::named("ideal").unwrap(),
            ),
            devices: Some(144),
            job: Some(Job::Train { batch: 64, sequence: 4096 }),
            objective: Some(Objective::Deadline(Nanoseconds(40_000_000))),
            pins: Pins::parse("tp=8,capacity_pct=125").unwrap_or_default(),
            routing: Some(Routing::PowerLaw(1.2)),
            forecast: Some(0.8),
            strict: true,
            limits: Thresholds::default(),
            command: "tessera".into(),
        }
    }

    #[test]
    fn a_question_survives_its_folder() {
        let (was, text) = (asked(), asked_json(&asked()).to_string());
        let again = asked_of("e", &serde_json::from_str(&text).unwrap()).unwrap();
        assert_eq!(again.machine, was.machine);
        assert_eq!((again.subject, again.devices, again.job), (was.subject, was.devices, was.job));
        assert_eq!((again.objective, again.pins, again.routing), (was.objective, was.pins, was.routing));
        assert_eq!((again.forecast, again.strict, again.limits), (was.forecast, was.strict, was.limits));
    }

    #[test]
    fn open_stays_open_and_nonsense_is_refused_by_its_key() {
        let mut a = asked();
        (a.devices, a.job, a.objective, a.routing) = (None, None, None, None);
        let again = asked_of("e", &asked_json(&a)).unwrap();
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
            ("forecast", json!("all")),
        ] {
            let mut v = asked_json(&a);
            v[key] = wrong;
            let ds = asked_of("e", &v).unwrap_err();
            assert_eq!(ds[0].code.id, "T0051");
            assert!(format!("{ds:?}").contains(key), "{ds:?}");
        }
        assert!(asked_of("e", &json!({"model": "older"})).is_err());
    }
}
