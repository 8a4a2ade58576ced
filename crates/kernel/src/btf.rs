//! The kernel's description of its own types (BTF, Documentation/bpf/btf.rst), as far as we look
//! things up in it: numbers of functions, places of fields.

use crate::error::{KernelError, Result};

const MAGIC: u16 = 0xeb9f;
const HEADER_BYTES: usize = 24;

const STRUCT: u32 = 4;
const UNION: u32 = 5;
const FUNCTION: u32 = 12;

/// The types of the running kernel.
#[derive(Debug)]
pub(crate) struct Btf {
    bytes: Vec<u8>,
    types: (usize, usize),
    names: usize,
    /// Where each type stands; the first has number 1.
    places: Vec<usize>,
}

impl Btf {
    /// Reads that of the kernel.
    pub(crate) fn of_kernel() -> Result<Self> {
        let bytes = std::fs::read("/sys/kernel/btf/vmlinux");
        Self::new(bytes.map_err(KernelError::io("read the kernel's types"))?)
            .ok_or_else(|| KernelError::Unexpected("/sys/kernel/btf/vmlinux".into()))
    }

    fn new(bytes: Vec<u8>) -> Option<Self> {
        let word = |at: usize| word(&bytes, at).map(|word| word as usize);
        if bytes.get(..2)? != MAGIC.to_le_bytes() || word(4)? != HEADER_BYTES {
            return None;
        }
        let types = (HEADER_BYTES + word(8)?, HEADER_BYTES + word(8)? + word(12)?);
        let names = HEADER_BYTES + word(16)?;
        let mut this = Self { bytes, types, names, places: Vec::new() };
        let mut at = this.types.0;
        while at < this.types.1 {
            this.places.push(at);
            let (kind, entries) = this.kind(at)?;
            at += 12 + after(kind, entries)?;
        }
        Some(this)
    }

    /// Kind and number of entries of the type at a place.
    fn kind(&self, at: usize) -> Option<(u32, usize)> {
        let info = word(&self.bytes, at + 4)?;
        Some((info >> 24 & 0x1f, info as usize & 0xffff))
    }

    fn is_named(&self, at: usize, name: &str) -> bool {
        let Some(offset) = word(&self.bytes, at) else { return false };
        let from = self.names + offset as usize;
        self.bytes.get(from..from + name.len()) == Some(name.as_bytes())
            && self.bytes.get(from + name.len()) == Some(&0)
    }

    /// Number of a function.
    pub(crate) fn function(&self, name: &str) -> Option<u32> {
        let found = self.places.iter().position(|&at| {
            self.kind(at).is_some_and(|(kind, _)| kind == FUNCTION) && self.is_named(at, name)
        });
        found.map(|index| index as u32 + 1)
    }

    /// Where in a structure a field begins, in bytes.
    pub(crate) fn field(&self, structure: &str, field: &str) -> Option<u32> {
        self.first_bit(structure, field).map(|bit| bit / 8)
    }

    /// Where in a structure a field begins, in bits.
    pub(crate) fn first_bit(&self, structure: &str, field: &str) -> Option<u32> {
        let of = |&&at: &&usize| {
            self.kind(at).is_some_and(|(kind, entries)| kind == STRUCT && entries > 0)
                && self.is_named(at, structure)
        };
        self.field_in(*self.places.iter().find(of)?, field, 4)
    }

    fn field_in(&self, at: usize, field: &str, depth: u32) -> Option<u32> {
        let (_, entries) = self.kind(at)?;
        (0..entries).find_map(|index| {
            let entry = at + 12 + index * 12;
            let bits = word(&self.bytes, entry + 8)? & 0xff_ffff;
            if self.is_named(entry, field) {
                return Some(bits);
            }
            if word(&self.bytes, entry)? != 0 || depth == 0 {
                return None;
            }
            // A field without a name has its own in ours.
            let inner = word(&self.bytes, entry + 4)?.checked_sub(1)?;
            let inner = *self.places.get(inner as usize)?;
            let (kind, _) = self.kind(inner)?;
            if kind != STRUCT && kind != UNION {
                return None;
            }
            Some(bits + self.field_in(inner, field, depth - 1)?)
        })
    }
}

fn word(bytes: &[u8], at: usize) -> Option<u32> {
    let bytes = bytes.get(at..at.checked_add(4)?)?;
    Some(u32::from_le_bytes(bytes.try_into().ok()?))
}

/// Bytes that follow the three words of a type.
fn after(kind: u32, entries: usize) -> Option<usize> {
    Some(match kind {
        // Integer, variable, tag of a declaration.
        1 | 14 | 17 => 4,
        // Pointer, forward, typedef, volatile, const, restrict, function, float, tag of a type.
        2 | 7..=12 | 16 | 18 => 0,
        // Array.
        3 => 12,
        // Structure, union, section, 64-bit enumeration.
        4 | 5 | 15 | 19 => entries * 12,
        // Enumeration, prototype.
        6 | 13 => entries * 8,
        _ => return None,
    })
}
