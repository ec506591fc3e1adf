//! The folder of a sealed plan: programs, memory plan, mapping and seal. The configs of the model lie beside them,
//! and only the kind of plan knows these.

use std::path::Path;

use serde::{Deserialize, Serialize};
use tessera_base::{Diagnostic, Diagnostics};
use tessera_ir::{
    Bundle, Communicator, GroupStatement, HostStatement, Phase, Program, RoleRanks, Slots, parse, print,
};
use tessera_mesh::{Group, GroupPath, HostMap, PlanHost, Rank, RankMap};
use tessera_plan::Mapping;
use tessera_verify::{DeviceLimits, SealedPlan, seal};

use crate::check::map_places_to_files;
use crate::codes::{T0011, T0012};
use crate::files::{StagedFolder, read_text};

/// File of a plan folder with the config of the model.
pub(crate) const CONFIG_FILE: &str = "config.json";

/// File of a plan folder with the digest, the roles and the calls.
pub(crate) const SEAL_FILE: &str = "seal.json";

/// The names of a model, which the seal does not cover.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct ModelNames {
    /// Name for display.
    pub(crate) model: String,
    /// Folder in which weights are looked up.
    pub(crate) model_dir: String,
}

/// What a plan folder holds besides the configs of the model.
pub(crate) struct SealedFolder {
    pub(crate) sealed: SealedPlan,
    pub(crate) mapping: Mapping,
    pub(crate) names: ModelNames,
}

/// Writes the programs, the memory plan, the mapping and the seal under `prefix` into a staged folder.
pub(crate) fn write_sealed(
    folder: &mut StagedFolder,
    prefix: &str,
    (sealed, mapping): (&SealedPlan, &Mapping),
    names: &ModelNames,
) -> Result<(), Diagnostic> {
    let mut write = |name: &str, bytes: &[u8]| folder.write(&format!("{prefix}{name}"), bytes);
    let mut slots = Vec::new();
    for phase in sealed.phase_names() {
        for role in sealed.roles() {
            let rank = role.ranks[0];
            if let (Some(p), Some(s)) = (sealed.rank_program(phase, rank), sealed.rank_slots(phase, rank)) {
                write(&program_file(phase, &role.role), print(p).as_bytes())?;
                slots.push(SlotsFile {
                    phase: phase.clone(),
                    role: role.role.clone(),
                    bytes: s.slot_bytes.clone(),
                    slot_of_value: s.value_slots.clone(),
                });
            }
        }
    }
    let seal = SealFile {
        tessera_plan: PLAN_VERSION,
        digest: sealed.digest_hex(),
        model: names.model.clone(),
        model_dir: names.model_dir.clone(),
        roles: sealed
            .roles()
            .iter()
            .map(|r| (r.role.clone(), r.ranks.iter().map(|r| r.0).collect()))
            .collect(),
        devices: sealed.rank_map().devices().to_vec(),
        hosts: sealed.hosts().map(HostsFile::new),
        phases: sealed.phase_names().to_vec(),
        calls: sealed.calls().to_vec(),
    };
    write("mapping.toml", mapping.to_toml().as_bytes())?;
    write("memory.json", to_json(&slots).as_bytes())?;
    write(SEAL_FILE, to_json(&seal).as_bytes())
}

/// Reads a plan folder and verifies it again; its digest must equal the sealed one. `sealed_text` makes the text
/// that the seal covers besides the programs.
///
/// # Errors
/// T0011, T0012, or what the verifier rejects.
pub(crate) fn read_sealed(
    dir: &Path,
    limits: &DeviceLimits,
    sealed_text: &dyn Fn(&Mapping) -> String,
) -> Result<SealedFolder, Diagnostics> {
    let (bundle, mapping, seal_file) = read_bundle(dir, sealed_text)?;
    let sealed = seal(bundle, limits).map_err(|mut ds| {
        map_places_to_files(&mut ds, &|at| {
            seal_file.find_program_file(at).map(|f| dir.join(f).display().to_string())
        });
        ds
    })?;
    if sealed.digest_hex() != seal_file.digest {
        return Err(vec![
            Diagnostic::error(&T0012, "the plan is not the one that was sealed")
                .with_label(dir.join(SEAL_FILE).display().to_string(), format!("digest {}", seal_file.digest))
                .with_label(dir.display().to_string(), format!("digest {}", sealed.digest_hex()))
                .with_hint("make the plan again with `tessera plan`"),
        ]);
    }
    let names = ModelNames { model: seal_file.model, model_dir: seal_file.model_dir };
    Ok(SealedFolder { sealed, mapping, names })
}

/// Returns the name of a model: the last part of its folder's path, or `model` if it has none.
pub(crate) fn folder_name(dir: &Path) -> String {
    dir.file_name().map_or("model".to_string(), |n| n.to_string_lossy().into_owned())
}

/// The contents of `seal.json`.
#[derive(Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct SealFile {
    tessera_plan: u32,
    digest: String,
    model: String,
    model_dir: String,
    roles: Vec<(String, Vec<u32>)>,
    devices: Vec<String>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    hosts: Option<HostsFile>,
    phases: Vec<String>,
    calls: Vec<(String, Vec<String>)>,
}

impl SealFile {
    /// Finds the program file of an op from the location text of a verifier diagnostic.
    fn find_program_file(&self, location: &str) -> Option<String> {
        let pairs = self.phases.iter().flat_map(|p| self.roles.iter().map(move |(r, _)| (p, r)));
        pairs
            .filter(|(phase, role)| location.contains(&format!("@{phase} role({role})")))
            .map(|(phase, role)| program_file(phase, role))
            .next()
    }
}

/// The hosts of a plan in `seal.json`.
#[derive(Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct HostsFile {
    /// The ranks of each host.
    ranks: Vec<Vec<u32>>,
    /// The switch domain of each host.
    domains: Vec<u32>,
    groups: Vec<GroupFile>,
}

/// A group that exchanges data, with the path of its data.
#[derive(Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct GroupFile {
    group: String,
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    is_transfer: bool,
    members: Vec<u32>,
    path: String,
}

impl HostsFile {
    fn new(stated: &HostStatement) -> HostsFile {
        let numbers = |ranks: &[Rank]| ranks.iter().map(|r| r.0).collect();
        HostsFile {
            ranks: stated.hosts.hosts().iter().map(|h| numbers(&h.ranks)).collect(),
            domains: stated.hosts.hosts().iter().map(|h| h.domain).collect(),
            groups: stated
                .groups
                .iter()
                .map(|GroupStatement { communicator: c, path }| GroupFile {
                    group: c.group.to_string(),
                    is_transfer: c.is_transfer,
                    members: numbers(&c.members),
                    path: path.name().to_string(),
                })
                .collect(),
        }
    }

    /// Returns the statement of the file. Whether it is true is for the verifier to find.
    ///
    /// # Errors
    /// T0011 for each part that states nothing.
    fn to_statement(&self, file: &str) -> Result<HostStatement, Diagnostics> {
        let wrong = |what: String| Diagnostic::error(&T0011, what).with_label(file.to_string(), "hosts");
        let ranks = |numbers: &[u32]| numbers.iter().copied().map(Rank).collect();
        let mut ds = Vec::new();
        if self.domains.len() != self.ranks.len() {
            let (domains, hosts) = (self.domains.len(), self.ranks.len());
            ds.push(wrong(format!("{domains} switch domains for {hosts} hosts")));
        }
        let mut groups = Vec::new();
        for g in &self.groups {
            let (Some(group), Some(path)) = (Group::parse(&g.group), GroupPath::from_name(&g.path)) else {
                ds.push(wrong(format!("`{}` with the path `{}` is no group", g.group, g.path)));
                continue;
            };
            let (is_transfer, members) = (g.is_transfer, ranks(&g.members));
            groups.push(GroupStatement { communicator: Communicator { group, is_transfer, members }, path });
        }
        if !ds.is_empty() {
            return Err(ds);
        }
        let hosts = self.ranks.iter().zip(&self.domains);
        let hosts = hosts.map(|(of_host, domain)| PlanHost { domain: *domain, ranks: ranks(of_host) });
        Ok(HostStatement { hosts: HostMap::new(hosts.collect()), groups })
    }
}

/// The memory plan of one program in `memory.json`.
#[derive(Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct SlotsFile {
    phase: String,
    role: String,
    bytes: Vec<u64>,
    slot_of_value: Vec<Option<u32>>,
}

/// Version of the plan folder. Version 2 renamed keys of the programs and of `memory.json`.
const PLAN_VERSION: u32 = 2;

/// The keys of plan version 1 that have other names now.
const PLAN_1_KEYS: &str = "plan version 2 has new names for keys of version 1: `of` of memory.json is `slot_of_value`, and the \
programs and mapping.toml have new names, too";

fn program_file(phase: &str, role: &str) -> String {
    format!("programs/{phase}.{role}.tir")
}

fn read_bundle(
    dir: &Path,
    sealed_text: &dyn Fn(&Mapping) -> String,
) -> Result<(Bundle, Mapping, SealFile), Diagnostics> {
    let shown = |name: &str| dir.join(name).display().to_string();
    let text = |name: &str| read_text(&dir.join(name), &T0011).map_err(|d| vec![d]);
    let seal_file: SealFile = from_json(&shown(SEAL_FILE), &text(SEAL_FILE)?)?;
    check_model_names(&seal_file, &shown(SEAL_FILE)).map_err(|d| vec![d])?;
    if seal_file.tessera_plan != PLAN_VERSION {
        let d = Diagnostic::error(&T0011, "another version of tessera made this plan")
            .with_label(shown("seal.json"), format!("plan version {}", seal_file.tessera_plan))
            .with_label("this build", format!("reads plan version {PLAN_VERSION}"))
            .with_hint("make the plan again with `tessera plan`");
        return Err(vec![if seal_file.tessera_plan == 1 { d.with_note(PLAN_1_KEYS) } else { d }]);
    }
    // A person who corrects the files sees the errors of all of them at once.
    let mut ds = Vec::new();
    let hosts = seal_file.hosts.as_ref().map(|h| h.to_statement(&shown(SEAL_FILE)));
    let hosts = keep_value(hosts.transpose(), &mut ds).flatten();
    let slots = text("memory.json").and_then(|text| from_json(&shown("memory.json"), &text));
    let slots: Option<Vec<SlotsFile>> = keep_value(slots, &mut ds);
    let mapping = text("mapping.toml").and_then(|text| Mapping::parse(&shown("mapping.toml"), &text));
    let mapping = keep_value(mapping, &mut ds);
    let places = mapping.as_ref().map(|mapping| {
        let world = mapping.world_mesh().map_err(|d| vec![*d])?;
        let rank_map = RankMap::new(&world, seal_file.devices.clone()).map_err(|d| vec![*d])?;
        Ok((world, rank_map))
    });
    let places = keep_value(places.transpose(), &mut ds).flatten();
    let phases = read_phases(dir, &seal_file, slots.as_deref(), &mut ds);
    let (Some(mapping), Some((mesh, rank_map)), true) = (mapping, places, ds.is_empty()) else {
        return Err(ds);
    };
    let ranks = |numbers: &[u32]| numbers.iter().copied().map(Rank).collect();
    let roles = seal_file.roles.iter();
    let roles = roles.map(|(role, numbers)| RoleRanks { role: role.clone(), ranks: ranks(numbers) });
    let bundle = Bundle {
        mesh,
        rank_map,
        hosts,
        roles: roles.collect(),
        phases,
        calls: seal_file.calls.clone(),
        mapping: sealed_text(&mapping),
    };
    Ok((bundle, mapping, seal_file))
}

/// Reads the programs of a plan with their memory plans. The phases are complete if no error was added;
/// without `slots`, whose error is reported already, only the programs are checked.
fn read_phases(dir: &Path, seal: &SealFile, slots: Option<&[SlotsFile]>, ds: &mut Diagnostics) -> Vec<Phase> {
    let mut phases = Vec::new();
    for name in &seal.phases {
        let mut phase = Phase { name: name.clone(), programs: Vec::new(), slots: Vec::new() };
        for (role, _) in &seal.roles {
            let file = dir.join(program_file(name, role));
            let shown = file.display().to_string();
            let program = read_text(&file, &T0011).map_err(|d| vec![d]).and_then(|text| parse(&text, &shown));
            let program =
                program.and_then(|p| check_program_name(p, name, role, &shown).map_err(|d| vec![d]));
            phase.programs.extend(keep_value(program, ds));
            let Some(slots) = slots else { continue };
            match slots.iter().find(|s| s.phase == *name && s.role == *role) {
                Some(m) => phase
                    .slots
                    .push(Slots { slot_bytes: m.bytes.clone(), value_slots: m.slot_of_value.clone() }),
                None => ds.push(Diagnostic::error(&T0011, format!("no memory plan for @{name} of {role}"))),
            }
        }
        phases.push(phase);
    }
    phases
}

/// Returns the value of a result, or adds its errors to those that were found before.
fn keep_value<T>(result: Result<T, Diagnostics>, ds: &mut Diagnostics) -> Option<T> {
    result.map_err(|errors| ds.extend(errors)).ok()
}

/// Checks that the model's name, which names output folders, is the name of one folder, and that it
/// is the name of the recorded model folder. The seal covers neither.
fn check_model_names(seal: &SealFile, file: &str) -> Result<(), Diagnostic> {
    let is_folder = Path::new(&seal.model).file_name().is_some_and(|name| *name == *seal.model);
    let names_it = seal.model_dir.is_empty() || folder_name(Path::new(&seal.model_dir)) == seal.model;
    if is_folder && names_it && !seal.model.chars().any(char::is_control) {
        return Ok(());
    }
    Err(Diagnostic::error(&T0011, "the model of the plan is not named after its folder")
        .with_label(file.to_string(), format!("model {:?}, model_dir {:?}", seal.model, seal.model_dir))
        .with_hint(
            "`model` is the last part of the path `model_dir`; make the plan again with `tessera plan`",
        ))
}

/// Checks that a program belongs to the phase and role of its file.
fn check_program_name(p: Program, phase: &str, role: &str, file: &str) -> Result<Program, Diagnostic> {
    if p.name == phase && p.role == role {
        return Ok(p);
    }
    Err(Diagnostic::error(&T0011, format!("the file of @{phase} of {role} holds @{} of {}", p.name, p.role))
        .with_label(file.to_string(), "this file"))
}

pub(crate) fn to_json<T: Serialize>(value: &T) -> String {
    // Plain structs of numbers and strings always serialise.
    serde_json::to_string_pretty(value).unwrap_or_default() + "\n"
}

pub(crate) fn from_json<T: for<'a> Deserialize<'a>>(file: &str, text: &str) -> Result<T, Diagnostics> {
    serde_json::from_str(text).map_err(|e| {
        vec![
            Diagnostic::error(&T0011, format!("{file} cannot be read: {e}"))
                .with_label(file.to_string(), "here"),
        ]
    })
}
