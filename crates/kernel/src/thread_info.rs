//! What the kernel tells about a thread from outside: `/proc/PID/status`, limits, scheduling.

use crate::error::{KernelError, Result, check};
use crate::kept_file::KeptFile;
use crate::ptrace::HostPid;

/// The lines of `/proc/PID/status` that matter to a checkpoint (proc(5)).
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Status {
    /// Name with the kernel's escapes undone.
    pub name: Vec<u8>,
    /// umask(2).
    pub umask: u32,
    /// State letter.
    pub state: u8,
    /// Thread group, host numbering.
    pub group: i32,
    /// Parent, host numbering.
    pub parent: i32,
    /// Tracer, host numbering; 0 for none.
    pub tracer: i32,
    /// Real, effective, saved, file system user.
    pub uids: [u32; 4],
    /// Real, effective, saved, file system group.
    pub gids: [u32; 4],
    /// Supplementary groups.
    pub groups: Vec<u32>,
    /// Thread number in the innermost pid namespace.
    pub inner_tid: i32,
    /// Thread group, process group and session in the innermost pid namespace.
    pub inner: [i32; 3],
    /// Signals pending for the thread, and for the process.
    pub pending: [u64; 2],
    /// Blocked, ignored and caught signals.
    pub signals: [u64; 3],
    /// Inheritable, permitted, effective, bounding, ambient.
    pub capabilities: [u64; 5],
    /// `NoNewPrivs`.
    pub no_new_privs: bool,
    /// seccomp mode.
    pub seccomp: u32,
    /// Number of seccomp filters.
    pub seccomp_filters: u32,
    /// Number of threads.
    pub threads: u32,
    /// `CoreDumping` or exiting states are not captured; resident set in KiB.
    pub resident_kb: u64,
}

/// Reads the status of a thread.
pub fn status(tid: HostPid) -> Result<Status> {
    status_of(tid, &mut KeptFile::of(tid, "status"))
}

/// The same, of a file that is kept.
pub fn status_of(tid: HostPid, file: &mut KeptFile) -> Result<Status> {
    let mut text = Vec::new();
    file.read("read thread status", &mut text).map_err(died(tid))?;
    let mut status = Status::default();
    for line in text.split(|&byte| byte == b'\n') {
        let Some(colon) = line.iter().position(|&byte| byte == b':') else { continue };
        let (key, value) = (&line[..colon], &line[colon + 1..]);
        if key == b"Name" {
            status.name = unescape(value.strip_prefix(b"\t").unwrap_or(value));
            continue;
        }
        let text = std::str::from_utf8(value).unwrap_or("").trim();
        take_line(&mut status, key, text);
    }
    Ok(status)
}

fn died(tid: HostPid) -> impl Fn(KernelError) -> KernelError {
    move |error| match error.errno() {
        Some(libc::ENOENT | libc::ESRCH) => KernelError::Died(tid),
        _ => error,
    }
}

/// A file of `/proc/TID`. Of one that ends meanwhile, opening may succeed and reading fail.
fn text(verb: &'static str, tid: HostPid, file: &str) -> Result<String> {
    let read = std::fs::read_to_string(format!("/proc/{tid}/{file}"));
    read.map_err(KernelError::io(verb)).map_err(died(tid))
}

/// Reads the name of a thread from its `comm` in /proc.
pub fn name_of(tid: HostPid, file: &mut KeptFile) -> Result<Vec<u8>> {
    let mut name = Vec::new();
    file.read("read thread name", &mut name).map_err(died(tid))?;
    name.truncate(name.len().saturating_sub(1));
    Ok(name)
}

fn take_line(status: &mut Status, key: &[u8], text: &str) {
    let number = || text.split_ascii_whitespace().next().and_then(|word| word.parse().ok());
    let last = || text.split_ascii_whitespace().last().and_then(|word| word.parse().ok());
    let hex = || u64::from_str_radix(text, 16).unwrap_or(0);
    match key {
        b"Umask" => status.umask = u32::from_str_radix(text, 8).unwrap_or(0),
        b"State" => status.state = text.bytes().next().unwrap_or(0),
        b"Tgid" => status.group = number().unwrap_or(0),
        b"PPid" => status.parent = number().unwrap_or(0),
        b"TracerPid" => status.tracer = number().unwrap_or(0),
        b"Uid" => status.uids = four(text),
        b"Gid" => status.gids = four(text),
        b"Groups" => status.groups = words(text).collect(),
        b"NStgid" => status.inner[0] = last().unwrap_or(0),
        b"NSpid" => status.inner_tid = last().unwrap_or(0),
        b"NSpgid" => status.inner[1] = last().unwrap_or(0),
        b"NSsid" => status.inner[2] = last().unwrap_or(0),
        b"SigPnd" => status.pending[0] = hex(),
        b"ShdPnd" => status.pending[1] = hex(),
        b"SigBlk" => status.signals[0] = hex(),
        b"SigIgn" => status.signals[1] = hex(),
        b"SigCgt" => status.signals[2] = hex(),
        b"CapInh" => status.capabilities[0] = hex(),
        b"CapPrm" => status.capabilities[1] = hex(),
        b"CapEff" => status.capabilities[2] = hex(),
        b"CapBnd" => status.capabilities[3] = hex(),
        b"CapAmb" => status.capabilities[4] = hex(),
        b"NoNewPrivs" => status.no_new_privs = text == "1",
        b"Seccomp" => status.seccomp = number().unwrap_or(0) as u32,
        b"Seccomp_filters" => status.seccomp_filters = number().unwrap_or(0) as u32,
        b"Threads" => status.threads = number().unwrap_or(0) as u32,
        b"VmRSS" => status.resident_kb = number().unwrap_or(0) as u64,
        _ => {}
    }
}

fn words(text: &str) -> impl Iterator<Item = u32> {
    text.split_ascii_whitespace().filter_map(|word| word.parse().ok())
}

fn four(text: &str) -> [u32; 4] {
    let mut all = [0; 4];
    for (slot, value) in all.iter_mut().zip(words(text)) {
        *slot = value;
    }
    all
}

fn unescape(name: &[u8]) -> Vec<u8> {
    let mut out = Vec::with_capacity(name.len());
    let mut bytes = name.iter().copied();
    while let Some(byte) = bytes.next() {
        if byte != b'\\' {
            out.push(byte);
            continue;
        }
        match bytes.next() {
            Some(b'n') => out.push(b'\n'),
            Some(b'\\') | None => out.push(b'\\'),
            Some(first @ b'0'..=b'7') => {
                let digits = [first, bytes.next().unwrap_or(b'0'), bytes.next().unwrap_or(b'0')];
                out.push(digits.iter().fold(0u8, |all, digit| {
                    all.wrapping_mul(8).wrapping_add(digit.wrapping_sub(b'0'))
                }));
            }
            Some(other) => out.extend([b'\\', other]),
        }
    }
    out
}

/// Soft and hard value of every resource limit of a process, in the kernel's order.
pub fn limits(pid: HostPid) -> Result<Vec<(u64, u64)>> {
    (0..16u32)
        .map(|resource| {
            let mut limit = libc::rlimit64 { rlim_cur: 0, rlim_max: 0 };
            let new = std::ptr::null::<libc::rlimit64>();
            // SAFETY: `limit` lives through the call; nothing is set.
            let done = unsafe { libc::prlimit64(pid.0, resource, new, &raw mut limit) };
            check("read resource limits", done.into())?;
            Ok((limit.rlim_cur, limit.rlim_max))
        })
        .collect::<Result<_>>()
        .or_else(|error| match error.errno() {
            // Of another user's process they can be asked with CAP_SYS_RESOURCE only, but read.
            Some(libc::EPERM) => limits_as_text(pid),
            _ => Err(error),
        })
}

/// `/proc/PID/limits`, whose lines are in another order than the kernel's numbers.
fn limits_as_text(pid: HostPid) -> Result<Vec<(u64, u64)>> {
    const NAMES: [&str; 16] = [
        "Max cpu time",
        "Max file size",
        "Max data size",
        "Max stack size",
        "Max core file size",
        "Max resident set",
        "Max processes",
        "Max open files",
        "Max locked memory",
        "Max address space",
        "Max file locks",
        "Max pending signals",
        "Max msgqueue size",
        "Max nice priority",
        "Max realtime priority",
        "Max realtime timeout",
    ];
    let text = text("read resource limits", pid, "limits")?;
    let number = |word: &str| match word {
        "unlimited" => Some(u64::MAX),
        word => word.parse().ok(),
    };
    NAMES
        .iter()
        .map(|name| {
            let line = text.lines().find_map(|line| line.strip_prefix(name));
            let mut words = line.unwrap_or_default().split_ascii_whitespace().map(number);
            match (words.next().flatten(), words.next().flatten()) {
                (Some(soft), Some(hard)) => Ok((soft, hard)),
                _ => Err(KernelError::Unexpected(format!("limits of {pid}: {name}"))),
            }
        })
        .collect()
}

/// Children that thread `tid` made; none if it is gone.
pub fn children(tid: HostPid) -> Result<Vec<HostPid>> {
    let text = match text("read children", tid, &format!("task/{tid}/children")) {
        Err(error) if error.is_died() => return Ok(Vec::new()),
        text => text?,
    };
    Ok(text.split_ascii_whitespace().filter_map(|word| word.parse().ok()).map(HostPid).collect())
}

/// wait(2) status of a process that has ended; `None` if it lives or is gone.
pub fn zombie_status(pid: HostPid) -> Result<Option<i32>> {
    let text = match text("read process state", pid, "stat") {
        Err(error) if error.is_died() => return Ok(None),
        text => text?,
    };
    // The name, in parentheses, may hold anything; the state follows, the status is the last.
    let rest = text.rsplit_once(')').map_or("", |(_, rest)| rest).trim();
    let status = rest.rsplit(' ').next().and_then(|word| word.parse().ok());
    Ok(status.filter(|_| rest.starts_with('Z')))
}

/// Scheduling of a thread: policy, priority, nice value, reset-on-fork.
pub fn scheduling(tid: HostPid) -> Result<(u32, u32, i32, bool)> {
    let mut attributes = [0u32; 14];
    let (address, bytes) = (attributes.as_mut_ptr(), size_of_val(&attributes));
    // SAFETY: the kernel writes at most `bytes` bytes of `struct sched_attr`.
    let done = unsafe { libc::syscall(libc::SYS_sched_getattr, tid.0, address, bytes, 0) };
    check("read scheduling", done)?;
    let flags = u64::from(attributes[2]) | u64::from(attributes[3]) << 32;
    Ok((attributes[1], attributes[5], attributes[4] as i32, flags & 1 != 0))
}

/// Affinity mask of a thread, 64 processors a word, without trailing empty words.
pub fn affinity(tid: HostPid) -> Result<Vec<u64>> {
    let mut mask = vec![0u64; 128];
    let bytes = mask.len() * 8;
    // SAFETY: the kernel writes at most `bytes` bytes.
    let written =
        unsafe { libc::syscall(libc::SYS_sched_getaffinity, tid.0, bytes, mask.as_mut_ptr()) };
    mask.truncate(check("read affinity", written)? as usize / 8);
    while mask.last() == Some(&0) {
        mask.pop();
    }
    Ok(mask)
}

/// ioprio_get(2) of a thread.
pub fn io_priority(tid: HostPid) -> Result<i32> {
    // SAFETY: no pointer is passed; 1 is IOPRIO_WHO_PROCESS.
    let value = unsafe { libc::syscall(libc::SYS_ioprio_get, 1, tid.0) };
    check("read I/O priority", value).map(|value| value as i32)
}

/// get_robust_list(2) of a thread: head and length.
pub fn robust_list(tid: HostPid) -> Result<[u64; 2]> {
    let mut found = [0u64; 2];
    let head = &raw mut found[0];
    let length = head.wrapping_add(1);
    // SAFETY: both words live through the call.
    let done = unsafe { libc::syscall(libc::SYS_get_robust_list, tid.0, head, length) };
    check("read robust list", done)?;
    Ok(found)
}

/// Whether two processes share one address space (kcmp(2)).
pub fn share_memory(one: HostPid, other: HostPid) -> Result<bool> {
    // SAFETY: no pointer is passed; 1 is KCMP_VM.
    let order = unsafe { libc::syscall(libc::SYS_kcmp, one.0, other.0, 1, 0, 0) };
    check("compare address spaces", order).map(|order| order == 0)
}

/// Numeric fields of `/proc/PID/stat` from the fourth on (ppid is index 0), and the name's length
/// left out.
pub fn stat(pid: HostPid) -> Result<Vec<u64>> {
    let text = text("read process stat", pid, "stat")?;
    let tail = text.rfind(')').map_or("", |at| &text[at + 1..]);
    Ok(tail
        .split_ascii_whitespace()
        .skip(1)
        .map(|word| word.parse::<i64>().map_or_else(|_| word.parse().unwrap_or(0), |n| n as u64))
        .collect())
}

#[cfg(test)]
mod tests {
    use std::process::Command;
    use std::sync::mpsc::channel;

    use super::*;

    /// Between the opening of a file of `/proc/PID` and its reading the process may be reaped.
    #[test]
    fn a_process_that_ends_while_it_is_looked_at_is_gone_and_no_error() {
        const PROCESSES: usize = 500;
        let (born, to_watch) = channel();
        let watching = std::thread::spawn(move || {
            for pid in to_watch {
                while std::fs::exists(format!("/proc/{pid}")).expect("/proc can be read") {
                    zombie_status(pid).expect("its end is no error");
                    children(pid).expect("its end is no error");
                }
            }
        });
        for _ in 0..PROCESSES {
            let mut child = Command::new("true").spawn().unwrap();
            born.send(HostPid(child.id() as i32)).unwrap();
            child.wait().unwrap();
        }
        drop(born);
        watching.join().unwrap();
    }
}
