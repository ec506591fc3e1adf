//! Classes of ops under which estimated and measured times are added up and compared.

use tessera_ir::{Op, OpKind, Opcode, Program};

/// A class of ops, in the order of tables: by the kind of work, then by name.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub struct OpClass {
    place: u8,
    /// Name, such as `matmul` or `all_reduce tp`.
    pub name: String,
}

impl OpClass {
    /// Returns the class of each op of a program, by its index; `None` for an op that launches nothing.
    #[must_use]
    pub fn of_program(p: &Program) -> Vec<Option<OpClass>> {
        let defs = p.defining_ops();
        p.ops.iter().map(|op| OpClass::of_op(p, &defs, op)).collect()
    }

    /// Returns the class of an op; a wait has that of its collective. `defs` are the defining ops of the values.
    pub(crate) fn of_op(p: &Program, defs: &[Option<usize>], op: &Op) -> Option<OpClass> {
        let (place, name) = match op.opcode {
            Opcode::EventRecord => return None,
            Opcode::Wait => {
                let issue = defs.get(op.operands.first()?.0 as usize).copied().flatten()?;
                return OpClass::of_op(p, defs, p.ops.get(issue)?);
            }
            o if o.is_collective() => {
                let group = op.comm_group().map_or(String::new(), |group| format!(" {group}"));
                return Some(OpClass { place: 8, name: o.name().to_string() + &group });
            }
            o if o.table_row().kind == OpKind::Source => return None,
            Opcode::Matmul | Opcode::Bmm | Opcode::HeadMatmul => (0, "matmul"),
            Opcode::GroupedMatmul | Opcode::MoeRoute => (1, "expert matmul"),
            Opcode::Attention | Opcode::PagedAttention | Opcode::RelativeAttention => (2, "attention"),
            Opcode::ExpertTokens
            | Opcode::TopKExperts
            | Opcode::ExpertLocality
            | Opcode::ExpertDistance
            | Opcode::ExpertDistanceGradient
            | Opcode::ExpertDraw
            | Opcode::ExpertPlaces
            | Opcode::ExpertGates
            | Opcode::ExpertStatistics
            | Opcode::ExpertWeights
            | Opcode::ExpertSlots
            | Opcode::ExpertReroute
            | Opcode::ExpertCounts => (3, "expert routing"),
            Opcode::ExpertPack | Opcode::ExpertPackFused => (4, "expert pack"),
            Opcode::ExpertCombine => (5, "expert combine"),
            Opcode::Sample => (6, "sample"),
            _ => (7, "memory-bound"),
        };
        Some(OpClass { place, name: name.to_string() })
    }
}
