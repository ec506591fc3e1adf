//! Typed access to the operands and attributes of an op. Code outside of this crate reads an op
//! through its view, or through one of the accessors here, and never by the name of an attribute.

use std::ops::Range;

use tessera_base::random::{DrawKey, ROUNDING_CHUNK};
use tessera_mesh::{Axis, Group, Reduction};

use crate::attr::Attr;
use crate::attr_kind::{
    AlgorithmName, AttrKind, CollectiveAlgorithm, CommAxis, GroupAxis, Opt, ReductionName, RoundingMode,
    Transport, TransportName, WeightLoad,
};
use crate::ids::ValueId;
use crate::op_table::{OpView, Opcode, views};
use crate::program::Op;
use crate::view_reader::{ViewError, ViewReader};

/// Where a collective's data goes on this rank's side.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum PeerPosition {
    /// The op sends to the member at this position of the group.
    To(u64),
    /// The op receives from the member at this position of the group.
    From(u64),
}

impl Op {
    /// Returns the view of this op.
    ///
    /// # Errors
    /// A missing operand, or a missing or invalid attribute. An op that passed the rules of
    /// [`crate::rules`] has a view.
    pub fn view(&self) -> Result<OpView, ViewError> {
        OpView::read(self.opcode, self.into())
    }

    /// Returns the mesh axis of a collective; `None` for a collective over the world. The group may
    /// be a subgroup of the axis: see [`Op::comm_group`].
    #[must_use]
    pub fn mesh_axis(&self) -> Option<Axis> {
        match GroupAxis::parse(self.attrs.get("axis")?)? {
            CommAxis::Axis(axis) => Some(axis),
            CommAxis::World => None,
        }
    }

    /// Returns the group of a collective, or the group whose positions determine the shards of an
    /// op. `None` if the attributes name no group.
    #[must_use]
    pub fn comm_group(&self) -> Option<Group> {
        let subgroup_size = self.attrs.get("group_size");
        match (GroupAxis::parse(self.attrs.get("axis")?)?, subgroup_size) {
            (CommAxis::World, None) => Some(Group::World),
            (CommAxis::World, Some(_)) => None,
            (CommAxis::Axis(axis), None) => Some(Group::whole_axis(axis)),
            (CommAxis::Axis(axis), Some(Attr::Int(w))) => {
                Some(Group::Axis { axis, subgroup_size: Some(u32::try_from(*w).ok()?) })
            }
            (CommAxis::Axis(_), Some(_)) => None,
        }
    }

    /// Returns the reduction that the attribute `reduction` names; `None` without the attribute.
    #[must_use]
    pub fn reduction(&self) -> Option<Reduction> {
        ReductionName::parse(self.attrs.get("reduction")?)
    }

    /// Returns the transport that a collective requests; `None` leaves the choice to the backend.
    #[must_use]
    pub fn requested_transport(&self) -> Option<Transport> {
        self.attrs.get("transport").and_then(Opt::<TransportName>::parse).flatten()
    }

    /// Returns the algorithm with which an all-reduce is tagged; `None` leaves the choice to the
    /// library that carries its data, and is the result for all other ops.
    #[must_use]
    pub fn algorithm_tag(&self) -> Option<CollectiveAlgorithm> {
        let tag = self.attrs.get("algorithm").filter(|_| self.opcode == Opcode::AllReduce)?;
        Opt::<AlgorithmName>::parse(tag).flatten()
    }

    /// Returns the name of the op for a timeline: that of its opcode, followed by the tag of its
    /// algorithm if it has one.
    #[must_use]
    pub fn timeline_name(&self) -> &'static str {
        match self.algorithm_tag() {
            Some(CollectiveAlgorithm::Tree) => "all_reduce tree",
            Some(CollectiveAlgorithm::Ring) => "all_reduce ring",
            None => self.opcode.name(),
        }
    }

    /// Returns the other end of a send or receive; `None` for other ops.
    #[must_use]
    pub fn peer_position(&self) -> Option<PeerPosition> {
        match self.view().ok()? {
            OpView::Send(send) => Some(PeerPosition::To(send.to)),
            OpView::Recv(recv) => Some(PeerPosition::From(recv.from)),
            _ => None,
        }
    }

    /// Returns the number of the batch to which a send or receive belongs; the ops of a batch form
    /// one launch.
    #[must_use]
    pub fn batch_number(&self) -> Option<i64> {
        match (self.opcode, self.attrs.get("batch")) {
            (Opcode::Send | Opcode::Recv, Some(Attr::Int(batch))) => Some(*batch),
            _ => None,
        }
    }

    /// Returns the hint of a logical program on where the op may run: `block.3`, `first`, `last`,
    /// `all` or `leader`.
    #[must_use]
    pub fn placement_hint(&self) -> Option<&str> {
        self.text_hint("at")
    }

    /// Returns the hint of a logical program on how a strategy may shard the op's value, such as
    /// `col`.
    #[must_use]
    pub fn part_hint(&self) -> Option<&str> {
        self.text_hint("part")
    }

    /// Returns the hint of a logical program on how many consecutive elements of a sharded dim stay
    /// together, such as the width of a head.
    #[must_use]
    pub fn unit_hint(&self) -> Option<u64> {
        match self.attrs.get("unit") {
            Some(Attr::Int(unit)) => u64::try_from(*unit).ok(),
            _ => None,
        }
    }

    /// Returns the name of an attribute that the op table requires and the op lacks.
    #[must_use]
    pub fn missing_attribute(&self) -> Option<&'static str> {
        let required = self.opcode.table_row().attrs.iter().filter(|a| !a.optional);
        required.map(|a| a.name).find(|name| !self.attrs.contains_key(*name))
    }

    /// Returns whether the op supplies a value before the program starts and therefore runs on no
    /// stream.
    #[must_use]
    pub fn is_source(&self) -> bool {
        matches!(self.opcode, Opcode::Input | Opcode::Call | Opcode::Weight)
    }

    /// Returns the name of the captured graph that contains the op.
    #[must_use]
    pub fn graph_name(&self) -> Option<&str> {
        self.text_hint("graph")
    }

    fn text_hint(&self, name: &str) -> Option<&str> {
        match self.attrs.get(name) {
            Some(Attr::Str(text)) => Some(text),
            _ => None,
        }
    }

    /// Returns how a weight is transformed when it is loaded; `None` for other ops.
    #[must_use]
    pub fn weight_load(&self) -> Option<WeightLoad> {
        views::Weight::new(self).ok().filter(|_| self.opcode == Opcode::Weight)?.load
    }

    /// Returns the number of segments that one binary tree adds to the op's sum; `None` for an op that states none.
    #[must_use]
    pub fn stated_segments(&self) -> Option<u64> {
        let segments = match self.view() {
            Ok(OpView::Matmul(v)) => v.segments,
            Ok(OpView::RmsNorm(v)) => v.segments,
            Ok(OpView::RowSquareSum(v)) => v.segments,
            Ok(_) | Err(_) => return None,
        };
        self.states_attr("segments").then_some(segments)
    }

    /// Returns whether the op states an attribute, even if with the value of its default.
    pub(crate) fn states_attr(&self, name: &str) -> bool {
        self.attrs.contains_key(name)
    }
}

impl<'a> From<&'a Op> for ViewReader<'a> {
    fn from(op: &'a Op) -> ViewReader<'a> {
        ViewReader { op_name: op.opcode.name(), operands: &op.operands, keyed: &op.keyed, attrs: &op.attrs }
    }
}

/// The gate of a `gate_residual` that has one.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Gate {
    /// Per-frame columns [f, c·d].
    pub columns: ValueId,
    /// Index of the d-wide column block that holds the gate.
    pub block: u64,
    /// Rows of x per row of the columns.
    pub frame_rows: u64,
}

impl views::GateResidual {
    /// Returns the gate; without one the op is a sum.
    #[must_use]
    pub fn gate(&self) -> Option<Gate> {
        Some(Gate { columns: self.m?, block: self.gate?, frame_rows: self.frame_rows? })
    }
}

/// The draws by which an op rounds stochastically.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct StochasticRounding {
    /// Key of the words; an element's index in the global tensor selects its word.
    pub key: DrawKey,
    /// Row of the global tensor at which the rows of the operand start.
    pub first_row: u64,
}

impl StochasticRounding {
    fn new(mode: RoundingMode, seed: Option<u64>, draw: u64, first_row: u64) -> Option<StochasticRounding> {
        match mode {
            RoundingMode::Nearest => None,
            RoundingMode::Stochastic => Some(StochasticRounding {
                key: DrawKey { seed: seed?, chunk: ROUNDING_CHUNK, draw: u32::try_from(draw).ok()? },
                first_row,
            }),
        }
    }
}

impl views::Cast {
    /// Returns the draws of a stochastic rounding; `None` if the cast rounds to nearest.
    #[must_use]
    pub fn stochastic_rounding(&self) -> Option<StochasticRounding> {
        StochasticRounding::new(self.rounding, self.seed, self.draw, self.first_row)
    }
}

impl views::Quantize {
    /// Returns the draws of a stochastic rounding; `None` if the op rounds to nearest.
    #[must_use]
    pub fn stochastic_rounding(&self) -> Option<StochasticRounding> {
        StochasticRounding::new(self.rounding, self.seed, self.draw, self.first_row)
    }
}

impl views::MoeRoute {
    /// Returns the number of tokens that an expert accepts of each group, for this many tokens and experts.
    #[must_use]
    pub fn capacity(&self, tokens: u64, experts: u64) -> u64 {
        let group = tokens.div_ceil(self.token_groups).max(1);
        let share = self.capacity_factor * (group * self.top_k) as f64 / experts as f64;
        // An expert receives a token at most once.
        (share.ceil() as u64).clamp(1, group)
    }
}

impl views::Attention {
    /// Returns the bias, and the rows of keys to whose scores it is added.
    #[must_use]
    pub fn key_bias(&self) -> Option<(ValueId, Range<u64>)> {
        Some((self.bias?, self.bias_rows.clone()?))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Attrs, OP_TABLE, StreamId};

    /// An op with as many operands as its row allows, and with every keyed operand.
    fn bare_op(opcode: Opcode, attrs: &[(&str, Attr)]) -> Op {
        let row = opcode.table_row();
        let operands: Vec<ValueId> = (0..row.operands.1 as u32).map(ValueId).collect();
        let keyed = (10..).map(ValueId);
        Op {
            opcode,
            issue: false,
            name: None,
            buffer: None,
            operands,
            keyed: row.keyed.iter().map(|k| k.name).zip(keyed).collect(),
            attrs: attrs.iter().map(|(name, attr)| ((*name).to_string(), attr.clone())).collect(),
            results: vec![],
            stream: StreamId(0),
            after: vec![],
            span: None,
        }
    }

    /// Values of every type of attribute, some of which each kind accepts.
    fn sample_attrs() -> Vec<Attr> {
        let texts = [
            "tp",
            "world",
            "sum",
            "nccl",
            "ring",
            "patch",
            "gelu_tanh",
            "f32",
            "fp8_e4m3",
            "sigmoid",
            "lru",
            "nearest",
            "odd",
            "",
        ];
        let numbers = [Attr::Int(-1), Attr::Int(0), Attr::Int(2), Attr::Float(0.5), Attr::Float(f64::NAN)];
        let lists = [vec![1, 2], vec![2, 1], vec![1, 2, 3], vec![0, 1, 2]].map(Attr::Ints);
        texts
            .map(|t| Attr::Str(t.to_string()))
            .into_iter()
            .chain(numbers)
            .chain(lists)
            .chain([Attr::Bool(true)])
            .collect()
    }

    fn accepted_attrs(opcode: Opcode) -> Attrs {
        let accepted = |row: &crate::AttrRow| sample_attrs().into_iter().find(|a| (row.accepts)(a));
        let rows = opcode.table_row().attrs.iter();
        rows.map(|row| (row.name.to_string(), accepted(row).expect(row.name))).collect()
    }

    #[test]
    fn an_op_has_a_view_if_and_only_if_the_table_accepts_its_attributes() {
        for row in OP_TABLE {
            let op = Op { attrs: accepted_attrs(row.opcode), ..bare_op(row.opcode, &[]) };
            assert!(op.view().is_ok(), "{}: {:?}", row.name, op.view());
            for attr in row.attrs {
                for sample in sample_attrs() {
                    let mut op = op.clone();
                    let accepted = (attr.accepts)(&sample);
                    op.attrs.insert(attr.name.to_string(), sample.clone());
                    assert_eq!(op.view().is_ok(), accepted, "{} {} {sample:?}", row.name, attr.name);
                }
                let mut op = op.clone();
                op.attrs.remove(attr.name);
                assert_eq!(op.view().is_ok(), attr.optional, "{} without {}", row.name, attr.name);
            }
        }
    }

    #[test]
    fn an_op_without_one_of_its_operands_has_no_view() {
        for row in OP_TABLE {
            let op = Op { attrs: accepted_attrs(row.opcode), ..bare_op(row.opcode, &[]) };
            for n in 0..row.operands.1 {
                let op = Op { operands: op.operands[..n].to_vec(), ..op.clone() };
                assert_eq!(op.view().is_ok(), n >= row.operands.0, "{} with {n} operands", row.name);
            }
            for (i, keyed) in row.keyed.iter().enumerate() {
                let mut op = op.clone();
                op.keyed.remove(i);
                assert_eq!(op.view().is_ok(), keyed.optional, "{} without {}", row.name, keyed.name);
            }
        }
    }

    #[test]
    fn defaults_stand_in_the_table_and_errors_name_the_attribute() {
        let grid = ("grid", Attr::Ints(vec![2, 3, 4]));
        let rope = bare_op(Opcode::Rope, &[("head_dim", Attr::Int(64)), grid.clone()]);
        let Ok(OpView::Rope(v)) = rope.view() else { panic!("{:?}", rope.view()) };
        assert_eq!((v.first_row, v.frame_stride, v.head_dim, v.grid), (0, 1, 64, [2, 3, 4]));
        assert_eq!((v.x, v.start), (ValueId(0), ValueId(10)));

        let message = |op: Op| op.view().unwrap_err().to_string();
        assert_eq!(message(bare_op(Opcode::Rope, &[grid])), "rope: attribute `head_dim` is missing");
        let eps = bare_op(Opcode::RmsNorm, &[("eps", Attr::Float(-1.0))]);
        assert_eq!(message(eps), "rms_norm: `eps` is -1.0, but must be a number ≥ 0");
    }

    #[test]
    fn only_an_all_reduce_has_a_tag_and_a_timeline_shows_it() {
        let tag = |name: &str| ("algorithm", Attr::Str(name.to_string()));
        let op = |opcode, name| bare_op(opcode, &[tag(name)]);
        for algorithm in [CollectiveAlgorithm::Tree, CollectiveAlgorithm::Ring] {
            let tagged = op(Opcode::AllReduce, algorithm.name());
            assert_eq!(tagged.algorithm_tag(), Some(algorithm));
            assert_eq!(tagged.timeline_name(), format!("all_reduce {}", algorithm.name()));
        }
        for untagged in
            [bare_op(Opcode::AllReduce, &[]), op(Opcode::AllReduce, "star"), op(Opcode::AllGather, "ring")]
        {
            assert_eq!(untagged.algorithm_tag(), None, "{untagged:?}");
            assert_eq!(untagged.timeline_name(), untagged.opcode.name());
        }
    }

    #[test]
    fn a_gate_needs_its_columns_and_both_attributes() {
        let (gate, rows) = (("gate", Attr::Int(2)), ("frame_rows", Attr::Int(6)));
        let view = |op: Op| views::GateResidual::new(&op).unwrap().gate();
        let full = bare_op(Opcode::GateResidual, &[gate.clone(), rows]);
        assert_eq!(view(full.clone()), Some(Gate { columns: ValueId(2), block: 2, frame_rows: 6 }));
        assert_eq!(view(Op { operands: full.operands[..2].to_vec(), ..full }), None);
        assert_eq!(view(bare_op(Opcode::GateResidual, &[gate])), None);
    }
}
