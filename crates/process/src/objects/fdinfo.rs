//! Reading `/proc/PID/fdinfo` (proc(5), fs/proc/fd.c).
//!
//! Every file starts with `pos`, `flags`, `mnt_id`, `ino`; then its kind adds lines of its own,
//! here called the *detail*.

use hotspare_image::objects::{FileLock, LockKind};
use hotspare_image::tree::GuestPid;
use hotspare_kernel::KernelError;

use super::error::{ObjectError, ObjectResult};

/// The lines that every file has.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Header {
    /// Offset.
    pub position: u64,
    /// Status flags and access mode, without `O_CLOEXEC`.
    pub flags: u32,
    /// `FD_CLOEXEC` of this descriptor.
    pub close_on_exec: bool,
    /// Mount the file was opened through.
    pub mount: i32,
    /// Inode number; one for all of the kernel's anonymous inodes.
    pub inode: u64,
}

fn unreadable(text: &[u8]) -> ObjectError {
    let text = String::from_utf8_lossy(&text[..text.len().min(120)]);
    ObjectError::Call(KernelError::Unexpected(format!("descriptor's fdinfo {text:?}")))
}

/// Splits a file into its header and where its detail begins.
pub fn parse(text: &[u8]) -> ObjectResult<(Header, usize)> {
    let mut at = 0;
    let mut next = |key: &[u8], radix: u64| -> Option<u64> {
        let line = text.get(at..)?.strip_prefix(key)?;
        let end = line.iter().position(|&byte| byte == b'\n')?;
        let value = number(line.get(..end)?, radix)?;
        at += key.len() + end + 1;
        Some(value)
    };
    let header = (|| {
        let position = next(b"pos:\t", 10)?;
        let flags = next(b"flags:\t0", 8)? as u32;
        let mount = next(b"mnt_id:\t", 10)? as i32;
        let inode = next(b"ino:\t", 10)?;
        let close_on_exec = flags & libc::O_CLOEXEC as u32 != 0;
        let flags = flags & !(libc::O_CLOEXEC as u32);
        Some(Header { position, flags, close_on_exec, mount, inode })
    })();
    header.map(|header| (header, at)).ok_or_else(|| unreadable(text))
}

/// A number in `radix` with blanks around it.
fn number(text: &[u8], radix: u64) -> Option<u64> {
    let text = text.trim_ascii();
    if text.is_empty() {
        return None;
    }
    // `pos` of some files is negative: -1 as the kernel's loff_t.
    if let Some(rest) = text.strip_prefix(b"-") {
        return number(rest, radix).map(u64::wrapping_neg);
    }
    text.iter().try_fold(0u64, |value, &byte| {
        let digit = (byte as char).to_digit(radix as u32)?;
        value.checked_mul(radix)?.checked_add(digit.into())
    })
}

/// A decimal number.
pub fn decimal(text: &[u8]) -> ObjectResult<u64> {
    number(text, 10).ok_or_else(|| unreadable(text))
}

/// A hexadecimal number.
pub fn hexadecimal(text: &[u8]) -> ObjectResult<u64> {
    number(text, 16).ok_or_else(|| unreadable(text))
}

/// The lines of a detail.
pub fn lines(detail: &[u8]) -> impl Iterator<Item = &[u8]> {
    detail.split(|&byte| byte == b'\n').filter(|line| !line.is_empty())
}

/// What follows `key:` in the detail.
pub fn field<'a>(detail: &'a [u8], key: &str) -> ObjectResult<&'a [u8]> {
    lines(detail)
        .find_map(|line| line.strip_prefix(key.as_bytes())?.strip_prefix(b":"))
        .map(<[u8]>::trim_ascii)
        .ok_or_else(|| unreadable(detail))
}

/// What follows `key:` in a line of several `key:value` items.
pub fn item<'a>(line: &'a [u8], key: &str) -> ObjectResult<&'a [u8]> {
    let mut rest = line;
    while let Some(at) = rest.windows(key.len()).position(|part| part == key.as_bytes()) {
        let before = at.checked_sub(1).map(|before| rest[before]);
        let after = &rest[at + key.len()..];
        if let (None | Some(b' '), Some(value)) = (before, after.strip_prefix(b":")) {
            let value = value.trim_ascii_start();
            let end = value.iter().position(|&byte| byte == b' ').unwrap_or(value.len());
            return Ok(&value[..end]);
        }
        rest = after;
    }
    Err(unreadable(line))
}

/// Something that tells files of one anonymous inode apart, stable while the guest stands still;
/// equal for descriptors of one description. 0 where there is nothing.
pub fn discriminator(detail: &[u8]) -> u64 {
    if detail.starts_with(b"eventfd-count") {
        return field(detail, "eventfd-id").and_then(decimal).unwrap_or(0);
    }
    let stable: [&[u8]; 5] = [b"tfd:", b"inotify", b"sigmask:", b"Pid:", b"clockid:"];
    if !stable.iter().any(|key| detail.starts_with(key)) {
        return 0;
    }
    // FNV-1a over the first line.
    let line = lines(detail).next().unwrap_or_default();
    line.iter().fold(0xcbf2_9ce4_8422_2325, |hash, &byte| {
        (hash ^ u64::from(byte)).wrapping_mul(0x0100_0000_01b3)
    })
}

/// The locks in a detail, which was read in process `holder`: fcntl(2) locks are shown only to the
/// process that holds them (fs/locks.c, `show_fd_locks`).
pub fn locks(detail: &[u8], holder: GuestPid) -> ObjectResult<Vec<FileLock>> {
    let mut locks = Vec::new();
    for line in lines(detail) {
        let Some(line) = line.strip_prefix(b"lock:\t") else { continue };
        // "1: POSIX  ADVISORY  WRITE 4711 fe:00:9978024 20 29"
        let words: Vec<&[u8]> =
            line.split(|&byte| byte == b' ').filter(|word| !word.is_empty()).collect();
        let [_, kind, _, mode, _, _, start, end] = words[..] else {
            return Err(unreadable(line));
        };
        let kind = match kind {
            b"POSIX" => LockKind::Posix,
            b"OFDLCK" => LockKind::OpenFile,
            b"FLOCK" => LockKind::Flock,
            other => {
                let kind = String::from_utf8_lossy(other);
                let reason = "leases cannot be moved; the program must not use F_SETLEASE";
                return Err(ObjectError::refused(format!("a lock of kind {kind}"), reason));
            }
        };
        let start = decimal(start)?;
        let length = match end {
            b"EOF" => 0,
            end => decimal(end)?.saturating_sub(start).saturating_add(1),
        };
        let holder = if kind == LockKind::Posix { holder } else { GuestPid(0) };
        locks.push(FileLock { kind, exclusive: mode == b"WRITE", start, length, holder });
    }
    Ok(locks)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_header_and_the_detail_are_told_apart() {
        let text = b"pos:\t17\nflags:\t02100002\nmnt_id:\t27\nino:\t99\nlock:\tx\n";
        let (header, at) = parse(text).unwrap();
        assert_eq!(header.position, 17);
        assert_eq!(header.flags, 0o100002);
        assert!(header.close_on_exec);
        assert_eq!((header.mount, header.inode), (27, 99));
        assert_eq!(&text[at..], b"lock:\tx\n");
    }

    #[test]
    fn broken_text_is_an_error() {
        for text in [&b""[..], b"pos:\t", b"pos:\t1\nflags:\t09\n", b"pos:\tx\nflags:\t02\n"] {
            parse(text).unwrap_err();
        }
        decimal(b"99999999999999999999").unwrap_err();
    }

    #[test]
    fn locks_are_read_as_the_kernel_shows_them() {
        let detail = b"lock:\t1: FLOCK  ADVISORY  WRITE 24246 fe:00:9978024 0 EOF\n\
            lock:\t2: POSIX  ADVISORY  READ 24246 fe:00:9978024 20 29\n";
        let locks = locks(detail, GuestPid(7)).unwrap();
        assert_eq!((locks[0].kind, locks[0].exclusive), (LockKind::Flock, true));
        assert_eq!((locks[0].start, locks[0].length, locks[0].holder), (0, 0, GuestPid(0)));
        assert_eq!((locks[1].kind, locks[1].exclusive), (LockKind::Posix, false));
        assert_eq!((locks[1].start, locks[1].length, locks[1].holder), (20, 10, GuestPid(7)));
    }

    #[test]
    fn a_lease_is_refused() {
        let detail = b"lock:\t1: LEASE  ACTIVE    READ 5 fe:00:12 0 EOF\n";
        assert!(matches!(locks(detail, GuestPid(1)), Err(ObjectError::Refused { .. })));
    }

    #[test]
    fn items_of_a_line_are_found_by_whole_key() {
        let line = b"inotify wd:a ino:9840a7 sdev:fe00000 mask:80000fff ignored_mask:0";
        assert_eq!(item(line, "wd").unwrap(), b"a");
        assert_eq!(item(line, "mask").unwrap(), b"80000fff");
        item(line, "k").unwrap_err();
    }
}
