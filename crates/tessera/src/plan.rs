//! From a model and a mapping to a sealed plan, and from a plan's folder back to one.

use std::path::Path;

use serde::{Deserialize, Serialize};
use tessera_base::{Bytes, Code, Diagnostic, Diagnostics};
use tessera_ir::{Bundle, Phase, Program, RoleRanks, Slots, parse, print};
use tessera_mesh::{Rank, RankMap};
use tessera_models::{VideoModel, calls, phases};
use tessera_plan::{Logical, Mapping, lower};
use tessera_verify::{Limits, SealedPlan, seal};

use crate::check::name_files;
use crate::files::{Folder, read_text};

/// A plan folder that cannot be taken.
pub static T0011: Code = Code {
    id: "T0011",
    title: "plan folder cannot be used",
    page: "A plan folder holds mapping.toml, the model's config.json and stream.toml, one .tir text per phase and role, \
memory.json and seal.json. One is missing, cannot be read, or does not fit the others. Make the plan again with \
`tessera plan`.",
};
/// A plan that differs from its seal.
pub static T0012: Code = Code {
    id: "T0012",
    title: "plan differs from its seal",
    page: "seal.json holds the digest of everything in the plan at the time it was made. What is there now has another \
digest: a program, the mapping or the memory plan was edited, or the folder is a mix of two plans. `tessera check` of \
a single program in it judges that program as it is; to run what was edited, plan again so that it is sealed.",
};

/// A sealed plan with what it was made from.
#[derive(Debug)]
pub struct Plan {
    /// Model configs, as sealed.
    pub video: VideoModel,
    /// Name of the model, for people.
    pub model: String,
    /// Folder of the model, where weights are looked for. Not part of the seal.
    pub model_dir: String,
    /// Mapping, as sealed.
    pub mapping: Mapping,
    /// The judged programs.
    pub sealed: SealedPlan,
}

/// Plans a model under a mapping.
///
/// # Errors
/// Why the mapping does not fit, or what the judge refuses.
pub fn make(
    video: &VideoModel,
    model: &str,
    model_dir: &str,
    mapping: &Mapping,
) -> Result<Plan, Diagnostics> {
    let mut mapping = mapping.clone();
    let mut bundle = lower(&logical(video), &mut mapping)?;
    bundle.mapping = sealed_text(&mapping, video);
    let sealed = seal(bundle, &Limits::default())?;
    Ok(Plan {
        video: video.clone(),
        model: model.to_string(),
        model_dir: model_dir.to_string(),
        mapping,
        sealed,
    })
}

pub(crate) fn logical(m: &VideoModel) -> Logical {
    Logical {
        phases: phases(m),
        calls: calls(m),
        heads: m.wan.heads,
        dim: m.wan.dim,
        ffn: m.wan.ffn_dim,
        tokens: m.chunk_tokens(),
        blocks: m.wan.layers,
    }
}

/// What the seal covers besides programs: mapping, config and stream settings, in canonical text.
fn sealed_text(mapping: &Mapping, video: &VideoModel) -> String {
    format!("{}\n{}\n{}", mapping.text(), video.wan.text(), video.stream.text())
}

/// What `seal.json` says.
#[derive(Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct SealFile {
    tessera_plan: u32,
    digest: String,
    model: String,
    model_dir: String,
    roles: Vec<(String, Vec<u32>)>,
    devices: Vec<String>,
    phases: Vec<String>,
    calls: Vec<(String, Vec<String>)>,
}

impl SealFile {
    /// The program file of an op, as the judge names it.
    fn file_of(&self, at: &str) -> Option<String> {
        let pairs = self.phases.iter().flat_map(|p| self.roles.iter().map(move |(r, _)| (p, r)));
        pairs
            .filter(|(phase, role)| at.contains(&format!("@{phase} role({role})")))
            .map(|(phase, role)| program_file(phase, role))
            .next()
    }
}

/// One program's memory plan in `memory.json`.
#[derive(Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct SlotsFile {
    phase: String,
    role: String,
    bytes: Vec<u64>,
    of: Vec<Option<u32>>,
}

const PLAN_VERSION: u32 = 1;

fn program_file(phase: &str, role: &str) -> String {
    format!("programs/{phase}.{role}.tir")
}

impl Plan {
    /// Writes the plan's folder. Nothing is left half written: the folder appears whole or not at all.
    ///
    /// # Errors
    /// When the folder exists or cannot be written.
    pub fn write(&self, dir: &Path) -> Result<(), Diagnostic> {
        let mut folder = Folder::create(dir)?;
        self.write_into(&mut folder, "")?;
        folder.finish()
    }

    /// Writes the plan's files below `prefix` of a folder under construction.
    pub(crate) fn write_into(&self, folder: &mut Folder, prefix: &str) -> Result<(), Diagnostic> {
        let mut write = |name: &str, bytes: &[u8]| folder.write(&format!("{prefix}{name}"), bytes);
        let mut slots = Vec::new();
        for phase in self.sealed.phases() {
            for role in self.sealed.roles() {
                let rank = role.ranks[0];
                if let (Some(p), Some(s)) = (self.sealed.program(phase, rank), self.sealed.slots(phase, rank))
                {
                    write(&program_file(phase, &role.role), print(p).as_bytes())?;
                    slots.push(SlotsFile {
                        phase: phase.clone(),
                        role: role.role.clone(),
                        bytes: s.bytes.clone(),
                        of: s.of.clone(),
                    });
                }
            }
        }
        let seal = SealFile {
            tessera_plan: PLAN_VERSION,
            digest: self.sealed.digest_hex(),
            model: self.model.clone(),
            model_dir: self.model_dir.clone(),
            roles: self
                .sealed
                .roles()
                .iter()
                .map(|r| (r.role.clone(), r.ranks.iter().map(|r| r.0).collect()))
                .collect(),
            devices: self.sealed.rank_map().devices().to_vec(),
            phases: self.sealed.phases().to_vec(),
            calls: self.sealed.calls().to_vec(),
        };
        write("mapping.toml", self.mapping.text().as_bytes())?;
        write("config.json", self.video.wan.text().as_bytes())?;
        write("stream.toml", self.video.stream.text().as_bytes())?;
        write("memory.json", json(&slots).as_bytes())?;
        write("seal.json", json(&seal).as_bytes())
    }

    /// Reads a plan's folder and judges it anew; the digest must be the sealed one.
    ///
    /// # Errors
    /// T0011, T0012, or what the judge refuses.
    pub fn read(dir: &Path) -> Result<Plan, Diagnostics> {
        Plan::read_within(dir, &Limits::default())
    }

    /// The same under limits of the machine that it is to run on.
    ///
    /// # Errors
    /// T0011, T0012, or what the judge refuses.
    pub fn read_within(dir: &Path, limits: &Limits) -> Result<Plan, Diagnostics> {
        let (bundle, video, mapping, seal_file) = read_bundle(dir)?;
        let sealed = seal(bundle, limits).map_err(|mut ds| {
            name_files(&mut ds, &|at| seal_file.file_of(at).map(|f| dir.join(f).display().to_string()));
            ds
        })?;
        if sealed.digest_hex() != seal_file.digest {
            return Err(vec![
                Diagnostic::error(&T0012, "the plan is not the one that was sealed")
                    .at(dir.join("seal.json").display().to_string(), format!("digest {}", seal_file.digest))
                    .at(dir.display().to_string(), format!("digest {}", sealed.digest_hex()))
                    .hint("make the plan again with `tessera plan`"),
            ]);
        }
        Ok(Plan { video, model: seal_file.model, model_dir: seal_file.model_dir, mapping, sealed })
    }

    /// The ranks that compute, ascending: all but those outside the mesh.
    pub fn mesh_ranks(&self) -> impl Iterator<Item = Rank> + use<> {
        let mesh = *self.sealed.mesh();
        mesh.iter().filter(move |r| mesh.contains(*r))
    }

    /// Weights, buffers and temporaries of a rank.
    #[must_use]
    pub fn memory(&self, rank: Rank) -> [Bytes; 3] {
        self.sealed.memory(rank).map_or([Bytes(0); 3], |m| [m.weights, m.buffers, m.temporaries])
    }
}

fn read_bundle(dir: &Path) -> Result<(Bundle, VideoModel, Mapping, SealFile), Diagnostics> {
    let shown = |name: &str| dir.join(name).display().to_string();
    let text = |name: &str| read_text(&dir.join(name), &T0011).map_err(|d| vec![d]);
    let seal_file: SealFile = from_json(&shown("seal.json"), &text("seal.json")?)?;
    if seal_file.tessera_plan != PLAN_VERSION {
        return Err(vec![Diagnostic::error(
            &T0011,
            format!("plan version {}; this build reads {PLAN_VERSION}", seal_file.tessera_plan),
        )]);
    }
    let slots: Vec<SlotsFile> = from_json(&shown("memory.json"), &text("memory.json")?)?;
    let video = VideoModel::parse(
        (&shown("config.json"), &text("config.json")?),
        (&shown("stream.toml"), &text("stream.toml")?),
    )?;
    let mapping = Mapping::parse(&shown("mapping.toml"), &text("mapping.toml")?)?;
    let world = mapping.world().map_err(|d| vec![*d])?;
    let rank_map = RankMap::new(&world, seal_file.devices.clone()).map_err(|d| vec![*d])?;
    let mut ds = Vec::new();
    let mut phases = Vec::new();
    for name in &seal_file.phases {
        let mut phase = Phase { name: name.clone(), programs: Vec::new(), memory: Vec::new() };
        for (role, _) in &seal_file.roles {
            let file = program_file(name, role);
            let program = text(&file).and_then(|t| parse(&t, &shown(&file)));
            let memory = slots.iter().find(|s| s.phase == *name && s.role == *role);
            match (program, memory) {
                (Ok(p), Some(m)) => {
                    phase.programs.push(named(p, name, role, &shown(&file)).map_err(|d| vec![d])?);
                    phase.memory.push(Slots { bytes: m.bytes.clone(), of: m.of.clone() });
                }
                (Err(e), _) => ds.extend(e),
                (_, None) => {
                    ds.push(Diagnostic::error(&T0011, format!("no memory plan for @{name} of {role}")))
                }
            }
        }
        phases.push(phase);
    }
    if !ds.is_empty() {
        return Err(ds);
    }
    let roles = seal_file
        .roles
        .iter()
        .map(|(role, ranks)| RoleRanks {
            role: role.clone(),
            ranks: ranks.iter().map(|r| Rank(*r)).collect(),
        })
        .collect();
    let bundle = Bundle {
        mesh: world,
        rank_map,
        roles,
        phases,
        calls: seal_file.calls.clone(),
        mapping: sealed_text(&mapping, &video),
    };
    Ok((bundle, video, mapping, seal_file))
}

/// A program must be of the phase and role whose file it stands in.
fn named(p: Program, phase: &str, role: &str, file: &str) -> Result<Program, Diagnostic> {
    if p.name == phase && p.role == role {
        return Ok(p);
    }
    Err(Diagnostic::error(&T0011, format!("the file of @{phase} of {role} holds @{} of {}", p.name, p.role))
        .at(file.to_string(), "this file"))
}

fn json<T: Serialize>(value: &T) -> String {
    // Plain structs of numbers and strings always serialise.
    serde_json::to_string_pretty(value).unwrap_or_default() + "\n"
}

fn from_json<T: for<'a> Deserialize<'a>>(file: &str, text: &str) -> Result<T, Diagnostics> {
    serde_json::from_str(text).map_err(|e| {
        vec![Diagnostic::error(&T0011, format!("{file} cannot be read: {e}")).at(file.to_string(), "here")]
    })
}
