//! `/proc/PID/maps` and the flags of `/proc/PID/smaps` (proc(5)).

use std::fs::File;
use std::io::{Read, Seek, SeekFrom};

use crate::error::{KernelError, Result};
use crate::ptrace::HostPid;

/// A line of `/proc/PID/maps`.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct MapLine {
    /// First byte.
    pub start: u64,
    /// One past the last byte.
    pub end: u64,
    /// Set of `PROT_*` bits.
    pub protection: u8,
    /// `MAP_SHARED`.
    pub shared: bool,
    /// Offset in the file, bytes.
    pub offset: u64,
    /// Major and minor number of the file's device; 0 for memory without a file.
    pub device: (u32, u32),
    /// Inode number; 0 for memory without a file.
    pub inode: u64,
    /// Path, `[heap]`, `[anon:…]` or nothing. A removed file ends in ` (deleted)`.
    pub name: String,
}

/// Reads the mappings of a process into `lines`, cleared first; `buffer` is scratch space.
pub fn read(pid: HostPid, buffer: &mut Vec<u8>, lines: &mut Vec<MapLine>) -> Result<()> {
    read_all(pid, "maps", buffer)?;
    parse(buffer, lines)
}

/// `/proc/PID/maps`, kept open and read again and again. It stays with the memory that the process
/// has when it is opened.
#[derive(Debug)]
pub struct Maps {
    file: File,
    text: Vec<u8>,
    fresh: Vec<u8>,
    /// `fresh` has been read already.
    ahead: bool,
}

impl Maps {
    /// Opens the mappings of a process.
    pub fn open(pid: HostPid) -> Result<Self> {
        let file = File::open(format!("/proc/{pid}/maps"));
        let file = file.map_err(KernelError::io("open process mappings"))?;
        Ok(Self { file, text: Vec::new(), fresh: Vec::new(), ahead: false })
    }

    /// Reads them into `lines`; false, and nothing done, if they are as they were the last time.
    pub fn read(&mut self, lines: &mut Vec<MapLine>) -> Result<bool> {
        if !std::mem::take(&mut self.ahead) {
            self.fill()?;
        }
        if self.fresh == self.text && !self.text.is_empty() {
            return Ok(false);
        }
        // Taken as read only when all of it has been understood.
        self.text.clear();
        parse(&self.fresh, lines)?;
        std::mem::swap(&mut self.text, &mut self.fresh);
        Ok(true)
    }

    /// Reads what the next [`Maps::read`] takes: of a process that stands still until then, or
    /// until [`Maps::forget_ahead`].
    pub fn read_ahead(&mut self) -> Result<()> {
        self.ahead = false;
        self.fill()?;
        self.ahead = true;
        Ok(())
    }

    /// The process goes on: what was read ahead says nothing any more.
    pub fn forget_ahead(&mut self) {
        self.ahead = false;
    }

    fn fill(&mut self) -> Result<()> {
        self.fresh.clear();
        let read = self.file.seek(SeekFrom::Start(0));
        let read = read.and_then(|_| self.file.read_to_end(&mut self.fresh));
        read.map(drop).map_err(KernelError::io("read process mappings"))
    }
}

fn parse(text: &[u8], lines: &mut Vec<MapLine>) -> Result<()> {
    lines.clear();
    for line in text.split(|&byte| byte == b'\n').filter(|line| !line.is_empty()) {
        let text = std::str::from_utf8(line)
            .map_err(|_| KernelError::Unexpected("a mapped path is not UTF-8".into()))?;
        let parsed = parse_line(text)
            .ok_or_else(|| KernelError::Unexpected(format!("maps line {text:?}")))?;
        lines.push(parsed);
    }
    Ok(())
}

fn read_all(pid: HostPid, what: &str, buffer: &mut Vec<u8>) -> Result<()> {
    buffer.clear();
    let file = File::open(format!("/proc/{pid}/{what}"));
    let mut file = file.map_err(KernelError::io("open process mappings"))?;
    file.read_to_end(buffer).map_err(KernelError::io("read process mappings"))?;
    Ok(())
}

fn parse_line(line: &str) -> Option<MapLine> {
    let mut rest = line;
    let mut field = || {
        let text = rest.trim_start_matches(' ');
        let end = text.find(' ').unwrap_or(text.len());
        let (head, tail) = text.split_at(end);
        rest = tail;
        head
    };
    let (start, end) = field().split_once('-')?;
    let bits = field().as_bytes();
    let offset = field();
    let (major, minor) = field().split_once(':')?;
    let inode = field();
    let protection = [(b'r', libc::PROT_READ), (b'w', libc::PROT_WRITE), (b'x', libc::PROT_EXEC)]
        .iter()
        .zip(bits)
        .filter(|((letter, _), bit)| *bit == letter)
        .fold(0, |all, ((_, flag), _)| all | *flag as u8);
    Some(MapLine {
        start: u64::from_str_radix(start, 16).ok()?,
        end: u64::from_str_radix(end, 16).ok()?,
        protection,
        shared: *bits.get(3)? == b's',
        offset: u64::from_str_radix(offset, 16).ok()?,
        device: (u32::from_str_radix(major, 16).ok()?, u32::from_str_radix(minor, 16).ok()?),
        inode: inode.parse().ok()?,
        name: unescape(rest.trim_start_matches(' ')),
    })
}

/// The kernel writes newlines in paths as `\012`.
fn unescape(name: &str) -> String {
    if name.contains("\\012") { name.replace("\\012", "\n") } else { name.to_owned() }
}

/// Flags of one mapping, from the `VmFlags` line of smaps.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Flags {
    /// First byte of the mapping.
    pub start: u64,
    /// One past its last byte.
    pub end: u64,
    /// Two-letter codes, such as `gd` for grows down (proc(5)).
    pub codes: Vec<[u8; 2]>,
    /// Protection key (pkeys(7)).
    pub protection_key: u8,
}

impl Flags {
    /// Whether code `code` is set.
    pub fn has(&self, code: &[u8; 2]) -> bool {
        self.codes.contains(code)
    }
}

/// Reads the flags of all mappings. Slow (it counts every page): not inside the pause.
pub fn flags(pid: HostPid) -> Result<Vec<Flags>> {
    let mut buffer = Vec::new();
    read_all(pid, "smaps", &mut buffer)?;
    let text = String::from_utf8_lossy(&buffer);
    let mut all: Vec<Flags> = Vec::new();
    for line in text.lines() {
        if let Some(codes) = line.strip_prefix("VmFlags:") {
            if let Some(last) = all.last_mut() {
                last.codes = codes
                    .split_ascii_whitespace()
                    .filter_map(|code| code.as_bytes().try_into().ok())
                    .collect();
            }
        } else if let Some(key) = line.strip_prefix("ProtectionKey:") {
            if let Some(last) = all.last_mut() {
                last.protection_key = key.trim().parse().unwrap_or(0);
            }
        } else if let Some(map) = parse_line(line).filter(|_| line.contains('-')) {
            let (start, end) = (map.start, map.end);
            all.push(Flags { start, end, codes: Vec::new(), protection_key: 0 });
        }
    }
    Ok(all)
}

#[cfg(test)]
mod tests {
    use std::os::fd::AsFd;

    use nix::sys::memfd::{MFdFlags, memfd_create};

    use super::*;
    use crate::shared::SharedMapping;

    #[test]
    fn a_line_with_spaces_in_its_path_is_read_whole() {
        let line = "7f0c1000-7f0c2000 r-xp 00001000 fe:00 1234       /tmp/a b (deleted)";
        let map = parse_line(line).expect("parses");
        assert_eq!((map.start, map.end, map.offset), (0x7f0c_1000, 0x7f0c_2000, 0x1000));
        assert_eq!((map.device, map.inode, map.shared), ((0xfe, 0), 1234, false));
        assert_eq!(map.name, "/tmp/a b (deleted)");
        assert_eq!(i32::from(map.protection), libc::PROT_READ | libc::PROT_EXEC);
    }

    #[test]
    fn mappings_read_ahead_count_once_and_can_be_forgotten() {
        let pid = HostPid(std::process::id() as i32);
        let mut maps = Maps::open(pid).expect("opens");
        let (mut lines, mut before) = (Vec::new(), Vec::new());
        assert!(maps.read(&mut before).expect("reads"));
        maps.read_ahead().expect("reads");
        let file = memfd_create(c"ahead", MFdFlags::empty()).expect("makes memory");
        nix::unistd::ftruncate(&file, 4096).expect("gives it a size");
        let memory = SharedMapping::new(file.as_fd(), 4096).expect("maps");
        let named = |lines: &[MapLine]| lines.iter().any(|line| line.name.contains("memfd:ahead"));
        let changed = maps.read(&mut lines).expect("takes what was read ahead");
        assert!(!(changed && named(&lines)), "read before it was mapped");
        maps.read(&mut lines).expect("reads anew");
        assert!(named(&lines));
        maps.read_ahead().expect("reads");
        drop(memory);
        maps.forget_ahead();
        maps.read(&mut lines).expect("reads anew");
        assert!(!named(&lines));
    }

    #[test]
    fn our_own_mappings_have_a_stack_that_grows_down() {
        let pid = HostPid(std::process::id() as i32);
        let mut lines = Vec::new();
        read(pid, &mut Vec::new(), &mut lines).expect("reads");
        let stack = lines.iter().find(|line| line.name == "[stack]").expect("has a stack");
        let flags = flags(pid).expect("reads flags");
        let flags = flags.iter().find(|flags| flags.start == stack.start).expect("same start");
        assert!(flags.has(b"gd"));
    }
}
