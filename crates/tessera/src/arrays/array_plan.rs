//! Sealed plans of array programs.

use std::collections::BTreeMap;
use std::path::Path;

use tessera_base::{Diagnostic, Diagnostics};
use tessera_device::T0806;
use tessera_ir::Bundle;
use tessera_mesh::Cluster;
use tessera_plan::{Mapping, state_hosts};
use tessera_verify::{DeviceLimits, ProvedProperty, SealedPlan, seal};

use super::array_program::{ArrayProgram, ArrayPrograms, PHASE_PREFIX};
use crate::codes::{T0011, T0012, T0090};
use crate::files::{StagedFolder, read_text};
use crate::plan_folder::{CONFIG_FILE, ModelNames, SEAL_FILE, from_json, read_sealed, to_json, write_sealed};
use crate::sim::to_bundle;

/// Name that a plan of array programs has in its folder, in place of a model's.
pub(super) const PLAN_NAME: &str = "arrays";

/// A sealed plan of array programs.
#[derive(Debug)]
pub struct ArrayPlan {
    /// The mapping under which the plan was made.
    pub mapping: Mapping,
    /// The verified programs of all roles. The phase of a program `f` is named `array.f`.
    pub sealed: SealedPlan,
    pub(super) programs: ArrayPrograms,
    /// The call scalars of the programs, which are equal in every call, by name.
    constants: BTreeMap<String, Vec<f32>>,
}

/// Checks that the devices of a cluster have a second tier of memory, if experts of a bundle lie in one.
///
/// # Errors
/// T0806, with the first weight that has tiers.
pub fn check_second_tier(bundle: &Bundle, cluster: &Cluster) -> Result<(), Diagnostic> {
    let programs = bundle.phases.iter().flat_map(|phase| &phase.programs);
    let weight = programs.flat_map(|program| &program.ops).find(|op| op.states_tier());
    match weight.and_then(|op| op.name.as_deref()) {
        Some(name) if cluster.host_bytes.value <= 0.0 => {
            let message = format!("the experts of `{name}` lie in two tiers of memory");
            Err(Diagnostic::error(&T0806, message)
                .with_label(&cluster.name, "host.bytes = 0: its devices have one tier")
                .with_hint("state the host memory in the cluster.toml, or plan without tiers"))
        }
        _ => Ok(()),
    }
}

impl ArrayPlan {
    /// Seals a bundle in which each phase is a program of arrays and each call has one phase.
    ///
    /// # Errors
    /// T0090 for a bundle whose calls are not of this kind, and what the verifier rejects.
    pub fn new(bundle: Bundle, mapping: &Mapping) -> Result<ArrayPlan, Diagnostics> {
        ArrayPlan::with_constants(bundle, mapping, BTreeMap::new())
    }

    /// As [`ArrayPlan::new`], for programs with call scalars. They have the same numbers in every call, and the seal covers
    /// them.
    ///
    /// # Errors
    /// As [`ArrayPlan::new`], and T0090 for a scalar without numbers.
    pub fn with_constants(
        mut bundle: Bundle,
        mapping: &Mapping,
        constants: BTreeMap<String, Vec<f32>>,
    ) -> Result<ArrayPlan, Diagnostics> {
        let mesh = mapping.world_mesh().map_err(|d| vec![*d])?;
        if mesh != bundle.mesh {
            return Err(vec![
                Diagnostic::error(&T0090, "the mesh of the programs is not that of the mapping")
                    .with_label("programs", bundle.mesh.to_string())
                    .with_label("mapping", mesh.to_string()),
            ]);
        }
        check_calls(&bundle)?;
        add_phase_prefix(&mut bundle);
        bundle.mapping = sealed_text(mapping, &constants);
        state_hosts(&mut bundle, mapping.host_map());
        let sealed = seal(bundle, &DeviceLimits::default())?;
        ArrayPlan::from_sealed(mapping.clone(), sealed, constants)
    }

    /// Returns the names of the programs, in order.
    pub fn program_names(&self) -> impl Iterator<Item = &str> {
        self.programs.by_name.keys().map(String::as_str)
    }

    /// Returns what a program reads and returns, or `None` if the plan has no such program.
    #[must_use]
    pub fn program(&self, name: &str) -> Option<&ArrayProgram> {
        self.programs.by_name.get(name)
    }

    /// Returns the name and the whole shape of every weight, in order of name.
    pub fn weights(&self) -> impl Iterator<Item = (&str, &[u64])> {
        self.programs.weights.iter().map(|(name, shape)| (name.as_str(), shape.as_slice()))
    }

    /// Writes the plan into a new folder.
    ///
    /// # Errors
    /// T0013 if the folder exists, T0014 if it cannot be written.
    pub fn write(&self, dir: &Path) -> Result<(), Diagnostic> {
        let mut folder = StagedFolder::create(dir)?;
        self.write_into(&mut folder, "")?;
        folder.commit()
    }

    /// Reads a plan folder and verifies it again; its digest must equal the sealed one.
    ///
    /// # Errors
    /// T0011, T0012, T0090, or what the verifier rejects.
    pub fn read(dir: &Path) -> Result<ArrayPlan, Diagnostics> {
        ArrayPlan::read_with_limits(dir, &DeviceLimits::default())
    }

    /// Like [`ArrayPlan::read`], with the limits of the machine that will run the plan.
    ///
    /// # Errors
    /// T0011, T0012, T0090, or what the verifier rejects.
    pub fn read_with_limits(dir: &Path, limits: &DeviceLimits) -> Result<ArrayPlan, Diagnostics> {
        let path = dir.join(CONSTANTS_FILE);
        let constants = match path.exists() {
            false => BTreeMap::new(),
            true => {
                let text = read_text(&path, &T0011).map_err(|d| vec![d])?;
                from_json(&path.display().to_string(), &text)?
            }
        };
        let read = read_sealed(dir, limits, &|mapping| sealed_text(mapping, &constants))?;
        ArrayPlan::from_sealed(read.mapping, read.sealed, constants)
    }

    /// Runs the verifier over the programs again, and returns what it proves.
    ///
    /// # Errors
    /// What the verifier rejects, and T0012 if what it seals has another digest; neither happens unless memory was damaged.
    pub fn verify_again(&self) -> Result<Vec<ProvedProperty>, Diagnostics> {
        let again = seal(to_bundle(&self.sealed), &DeviceLimits::default())?;
        if again.digest() != self.sealed.digest() {
            return Err(vec![
                Diagnostic::error(&T0012, "the plan in memory is not the one that was sealed")
                    .with_label("sealed", self.sealed.digest_hex())
                    .with_label("in memory", again.digest_hex()),
            ]);
        }
        Ok(again.list_properties())
    }

    /// Returns whether a folder holds a plan of array programs: it has no config of a model.
    pub(crate) fn is_in(dir: &Path) -> bool {
        dir.join(SEAL_FILE).is_file() && !dir.join(CONFIG_FILE).exists()
    }

    /// Writes the plan's files under `prefix` into a staged folder.
    pub(super) fn write_into(&self, folder: &mut StagedFolder, prefix: &str) -> Result<(), Diagnostic> {
        let names = ModelNames { model: PLAN_NAME.to_string(), model_dir: String::new() };
        write_sealed(folder, prefix, (&self.sealed, &self.mapping), &names)?;
        match self.constants.is_empty() {
            true => Ok(()),
            false => folder.write(&format!("{prefix}{CONSTANTS_FILE}"), to_json(&self.constants).as_bytes()),
        }
    }

    fn from_sealed(
        mapping: Mapping,
        sealed: SealedPlan,
        constants: BTreeMap<String, Vec<f32>>,
    ) -> Result<ArrayPlan, Diagnostics> {
        Ok(ArrayPlan { programs: ArrayPrograms::read(&sealed, &constants)?, mapping, sealed, constants })
    }
}

/// File of a plan folder with the numbers of call scalars.
const CONSTANTS_FILE: &str = "constants.json";

/// Returns the canonical text that the seal covers besides the programs.
fn sealed_text(mapping: &Mapping, constants: &BTreeMap<String, Vec<f32>>) -> String {
    match constants.is_empty() {
        true => mapping.to_toml(),
        false => format!("{}\n{}", mapping.to_toml(), to_json(constants)),
    }
}

/// Checks that each call runs the phase of its own name, and each phase has a call.
fn check_calls(bundle: &Bundle) -> Result<(), Diagnostics> {
    let calls = bundle.calls.iter().filter(|(name, phases)| phases[..] != [name.as_str()]);
    let mut found: Diagnostics = calls
        .map(|(name, phases)| {
            Diagnostic::error(&T0090, format!("the call `{name}` does not run the program of its name alone"))
                .with_label("call", format!("phases {phases:?}"))
        })
        .collect();
    let is_called = |name: &String| bundle.calls.iter().any(|(call, _)| call == name);
    let uncalled = bundle.phases.iter().filter(|phase| !is_called(&phase.name));
    found.extend(
        uncalled.map(|phase| Diagnostic::error(&T0090, format!("no call runs the program `{}`", phase.name))),
    );
    if found.is_empty() { Ok(()) } else { Err(found) }
}

/// Names the phases so that the lockstep knows their kind, whatever names a user chose.
fn add_phase_prefix(bundle: &mut Bundle) {
    let prefixed = |name: &str| format!("{PHASE_PREFIX}{name}");
    for phase in &mut bundle.phases {
        phase.name = prefixed(&phase.name);
        phase.programs.iter_mut().for_each(|program| program.name = prefixed(&program.name));
    }
    for phase in bundle.calls.iter_mut().flat_map(|(_, phases)| phases) {
        *phase = prefixed(phase);
    }
}
