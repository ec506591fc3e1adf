//! The values of one rank's program during an evaluation.

use tessera_ir::{DType, Program, Type, ValueId};

use crate::Tensor;
use crate::collectives::CollectiveTicket;

/// A value of a program.
pub(crate) enum EvalValue {
    Tensor(Tensor),
    Int(i64),
    Ticket(CollectiveTicket),
    Event,
}

/// The values that the ops of one rank have defined so far.
pub(crate) struct RankValues<'a> {
    program: &'a Program,
    values: Vec<Option<EvalValue>>,
}

impl<'a> RankValues<'a> {
    /// Creates the values of a program of which no op was evaluated.
    pub(crate) fn new(program: &'a Program) -> RankValues<'a> {
        RankValues { program, values: program.values.iter().map(|_| None).collect() }
    }

    /// Defines a value.
    ///
    /// # Errors
    /// A message if the value is not of the declared type.
    pub(crate) fn define(&mut self, v: ValueId, value: EvalValue) -> Result<(), String> {
        value.check_type(self.program.type_of(v))?;
        self.values[v.0 as usize] = Some(value);
        Ok(())
    }

    pub(crate) fn type_of(&self, v: ValueId) -> &'a Type {
        self.program.type_of(v)
    }

    pub(crate) fn tensor_value(&self, v: ValueId) -> Result<&Tensor, String> {
        match self.get(v) {
            Some(EvalValue::Tensor(t)) => Ok(t),
            _ => Err(format!("%{} holds no tensor", self.program.value(v).name)),
        }
    }

    pub(crate) fn float_scalar(&self, v: ValueId) -> Result<f64, String> {
        match self.tensor_value(v)?.data() {
            [x] => Ok(*x),
            _ => Err(format!("%{} is not a scalar", self.program.value(v).name)),
        }
    }

    pub(crate) fn int_value(&self, v: ValueId) -> Result<i64, String> {
        match self.get(v) {
            Some(EvalValue::Int(i)) => Ok(*i),
            _ => Err(format!("%{} is not an integer", self.program.value(v).name)),
        }
    }

    pub(crate) fn ticket_value(&self, v: ValueId) -> Result<CollectiveTicket, String> {
        match self.get(v) {
            Some(EvalValue::Ticket(t)) => Ok(t.clone()),
            _ => Err("has no ticket of an issued collective".to_string()),
        }
    }

    fn get(&self, v: ValueId) -> Option<&EvalValue> {
        self.values.get(v.0 as usize)?.as_ref()
    }
}

impl EvalValue {
    fn check_type(&self, ty: &Type) -> Result<(), String> {
        let (fits, have) = match self {
            EvalValue::Tensor(t) => (
                !ty.is_token()
                    && ty.dtype != DType::I64
                    && t.shape().iter().map(|n| *n as u64).eq(ty.shape.iter().copied()),
                format!("a tensor {:?}", t.shape()),
            ),
            EvalValue::Int(_) => (ty.dtype == DType::I64 && ty.shape.is_empty(), "an integer".to_string()),
            EvalValue::Ticket(_) => (ty.dtype == DType::Ticket, "a token".to_string()),
            EvalValue::Event => (ty.dtype == DType::Event, "a token".to_string()),
        };
        if fits {
            Ok(())
        } else {
            Err(format!("returns {have}, but the annotation is {}{:?}", ty.dtype, ty.shape))
        }
    }
}
