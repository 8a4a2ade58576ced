//! Writes the programs that copy fields of the kernel's structures, found by their names.

use std::os::fd::OwnedFd;

use crate::bpf::{
    self, EXIT, Instruction, PROBE_READ_KERNEL, SEQ_WRITE, add, and, copy, helper, load, load_byte,
    set, store_byte,
};
use crate::btf::Btf;

/// Registers of a program: its context, what it is called for, what was followed to.
pub(super) const CONTEXT: u8 = 6;
pub(super) const IT: u8 = 7;
pub(super) const THERE: u8 = 8;

/// A program in the making; `at` is where in the buffer the next field goes.
pub(super) struct Writer<'a> {
    pub btf: &'a Btf,
    pub buffer: &'a OwnedFd,
    pub code: Vec<Instruction>,
    pub at: usize,
    /// A field that this kernel does not have.
    pub missing: Option<String>,
}

impl<'a> Writer<'a> {
    pub fn new(btf: &'a Btf, buffer: &'a OwnedFd) -> Self {
        Self { btf, buffer, code: Vec::new(), at: 0, missing: None }
    }

    /// Where in a structure a field begins.
    pub fn place(&mut self, of: &str, field: &str) -> Option<u32> {
        self.place_of_bit(of, field).map(|bit| bit / 8)
    }

    fn place_of_bit(&mut self, of: &str, field: &str) -> Option<u32> {
        let place = self.btf.first_bit(of, field);
        if place.is_none() {
            self.missing = Some(format!("{field} of struct {of}"));
        }
        place
    }

    /// Hands the first `bytes` of the buffer to the reader and ends.
    pub fn record(&self, bytes: usize) -> Vec<Instruction> {
        let mut code = vec![load(1, CONTEXT, 0), load(1, 1, 0)];
        code.extend(bpf::value_of(2, self.buffer, 0));
        code.extend([set(3, bytes as i32), helper(SEQ_WRITE), set(0, 0), EXIT]);
        code
    }

    /// Copies a field behind a register into the buffer; says where.
    pub fn bytes(&mut self, base: u8, of: &str, field: &str, bytes: usize) -> Option<usize> {
        let offset = self.place(of, field)?;
        Some(self.at_offset(base, offset, bytes))
    }

    pub fn at_offset(&mut self, base: u8, offset: u32, bytes: usize) -> usize {
        let at = self.at;
        self.code.extend(bpf::value_of(1, self.buffer, at));
        self.code.extend([set(2, bytes as i32), copy(3, base), add(3, offset as i32)]);
        self.code.push(helper(PROBE_READ_KERNEL));
        self.at += bytes.next_multiple_of(8);
        at
    }

    pub fn words(&mut self, base: u8, of: &str, fields: &[&str]) -> Option<()> {
        fields.iter().try_for_each(|field| self.bytes(base, of, field, 8).map(drop))
    }

    pub fn halves(&mut self, base: u8, of: &str, fields: &[&str]) -> Option<()> {
        fields.iter().try_for_each(|field| self.bytes(base, of, field, 4).map(drop))
    }

    /// Copies fields behind a register, each given with its bytes, in as few pieces as may be: what
    /// lies between two of them comes along where that is little.
    pub fn pieces(&mut self, base: u8, of: &str, fields: &[(&str, u32)]) -> Option<()> {
        const GAP: u32 = 40;
        let mut places = Vec::new();
        for (field, bytes) in fields {
            let from = self.place(of, field)?;
            places.push((from, from + bytes));
        }
        places.sort_unstable();
        let mut pieces: Vec<(u32, u32)> = Vec::new();
        for (from, to) in places {
            match pieces.last_mut().filter(|last| from <= last.1 + GAP) {
                Some(last) => last.1 = last.1.max(to),
                None => pieces.push((from, to)),
            }
        }
        for (from, to) in pieces {
            self.at_offset(base, from, (to - from) as usize);
        }
        Some(())
    }

    /// Follows a pointer behind a register; [`THERE`] points there then.
    pub fn follow(&mut self, base: u8, of: &str, field: &str) -> Option<()> {
        let offset = self.place(of, field)?;
        self.follow_offset(base, offset);
        Some(())
    }

    pub fn follow_offset(&mut self, base: u8, offset: u32) {
        self.code.extend([copy(1, 10), add(1, -8), set(2, 8), copy(3, base)]);
        self.code.extend([add(3, offset as i32), helper(PROBE_READ_KERNEL), load(THERE, 10, -8)]);
    }

    /// Copies a field of one bit.
    pub fn bit(&mut self, base: u8, of: &str, field: &str) -> Option<()> {
        let bit = self.place_of_bit(of, field)?;
        let at = self.at_offset(base, bit / 8, 1);
        self.code.extend(bpf::value_of(1, self.buffer, at));
        self.code.extend([load_byte(2, 1, 0), and(2, 1 << (bit % 8)), store_byte(1, 0, 2)]);
        Some(())
    }
}
