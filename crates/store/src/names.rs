//! Names of objects. A listing says which checkpoints there are, of when, how large, and what each
//! builds on; nothing needs to be opened for that.

use std::fmt::Write;

/// What a checkpoint stands on.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Base {
    /// Nothing: it is whole.
    Whole,
    /// The one of this epoch, of the same reign.
    Epoch(u64),
}

/// A checkpoint, as its name has it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Name {
    /// Who wrote it: reigns over one guest are numbered from 1 in the store.
    pub reign: u64,
    /// The epoch that it ends.
    pub epoch: u64,
    /// What it stands on.
    pub base: Base,
    /// When it was taken: milliseconds since 1970, by the clock of its host.
    pub time_ms: u64,
    /// Bytes of its packs.
    pub bytes: u64,
}

impl Name {
    /// The last part of its manifest's name.
    #[must_use]
    pub fn manifest(&self) -> String {
        let Self { reign, epoch, time_ms, bytes, .. } = self;
        let base = match self.base {
            Base::Whole => "whole".to_owned(),
            Base::Epoch(epoch) => format!("on{epoch}"),
        };
        format!("{reign:06}-{epoch:012}-{time_ms:013}-{bytes}-{base}")
    }

    /// Reads the last part of a manifest's name.
    #[must_use]
    pub fn parse(text: &str) -> Option<Self> {
        let mut parts = text.split('-');
        let mut number = || parts.next()?.parse::<u64>().ok();
        let (reign, epoch, time_ms, bytes) = (number()?, number()?, number()?, number()?);
        let base = match parts.next()? {
            "whole" => Base::Whole,
            on => Base::Epoch(on.strip_prefix("on")?.parse().ok()?),
        };
        let name = Self { reign, epoch, base, time_ms, bytes };
        // One checkpoint has one name.
        let sound = name.base < Base::Epoch(epoch) && name.manifest() == text;
        (parts.next().is_none() && sound).then_some(name)
    }

    /// The last part of a pack's name. What is written again after a failure has another name: the
    /// failed write may have come to something, or still come.
    #[must_use]
    pub fn pack(&self, attempt: u32, number: usize) -> String {
        let kind = if self.base == Base::Whole { 'w' } else { 'i' };
        format!("{:06}-{:012}-{kind}-{attempt}-{number:05}", self.reign, self.epoch)
    }

    /// Whose pack this is: reign, epoch, and whether of a whole checkpoint.
    #[must_use]
    pub fn owner_of_pack(text: &str) -> Option<(u64, u64, bool)> {
        let mut parts = text.split('-');
        let (reign, epoch) = (parts.next()?.parse().ok()?, parts.next()?.parse().ok()?);
        let whole = parts.next()? == "w";
        Some((reign, epoch, whole))
    }
}

/// A guest's name as part of a path: any text, and only letters that every store allows.
#[must_use]
pub fn folder(guest: &str) -> String {
    let mut folder = String::new();
    for (at, byte) in guest.bytes().enumerate() {
        match byte {
            b'a'..=b'z' | b'A'..=b'Z' | b'0'..=b'9' => folder.push(byte.into()),
            b'-' | b'.' if at > 0 => folder.push(byte.into()),
            // Writing to memory cannot fail.
            _ => drop(write!(folder, "_{byte:02x}")),
        }
    }
    folder
}

/// The guest of a folder.
#[must_use]
pub fn guest(folder: &str) -> Option<String> {
    let mut bytes = Vec::new();
    let mut rest = folder.as_bytes();
    while let Some((&first, others)) = rest.split_first() {
        rest = others;
        if first != b'_' {
            bytes.push(first);
            continue;
        }
        let digits = std::str::from_utf8(rest.get(..2)?).ok()?;
        bytes.push(u8::from_str_radix(digits, 16).ok()?);
        rest = &rest[2..];
    }
    let guest = String::from_utf8(bytes).ok()?;
    (self::folder(&guest) == folder && !guest.is_empty()).then_some(guest)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_read_as_they_are_written() {
        let name = Name { reign: 3, epoch: 12, base: Base::Whole, time_ms: 5, bytes: 99 };
        let later = Name { base: Base::Epoch(7), ..name };
        for name in [name, later] {
            assert_eq!(Name::parse(&name.manifest()), Some(name));
            assert_eq!(
                Name::owner_of_pack(&name.pack(1, 2)),
                Some((3, 12, name.base == Base::Whole))
            );
        }
        let wrong = name.manifest().replace("whole", "on12");
        for wrong in [wrong.as_str(), "1-2-3-4-whole", "", "000001-x", "000003-000000000012"] {
            assert_eq!(Name::parse(wrong), None, "{wrong}");
        }
    }

    #[test]
    fn any_guest_has_a_folder_of_its_own() {
        for name in ["redis", "/usr/bin/redis", "a b", "..", "_", "größe", "-x", "a/../b"] {
            let folder = folder(name);
            assert!(!folder.contains('/') && !folder.starts_with('.'), "{folder}");
            assert_eq!(guest(&folder).as_deref(), Some(name));
        }
        assert_eq!(guest("_zz"), None);
        assert_eq!(guest(""), None);
    }
}
