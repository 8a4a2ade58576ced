//! What is in the way of protecting processes, as far as `/proc` shows it: nothing is stopped,
//! nothing duplicated, nothing taken. `hotspare check --pid` looks in this way alone.

use std::collections::{BTreeMap, BTreeSet};
use std::ffi::CString;
use std::os::fd::AsFd;
use std::path::Path;

use anyhow::{Context, bail};
use hotspare_kernel::descriptor::{self, FileStat};
use hotspare_kernel::proc_maps::{self, MapLine};
use hotspare_kernel::sock_diag::SockDiag;
use hotspare_kernel::{HostPid, thread_info, xattr};
use hotspare_process::capture::space::is_shared_memory;
use hotspare_process::objects::error::ObjectError;
use hotspare_process::objects::rules::{FileRules, Standing};
use hotspare_process::objects::{class, device};

use crate::preflight::{Obstacle, obstacle};

/// POSIX timers that a checkpoint has room for.
const TIMERS_MAX: usize = 150;
const SEE: &str = "run the program without it; LIMITS.md says more";

/// A process and all its descendants, the oldest first.
pub fn family(pid: i32) -> anyhow::Result<Vec<HostPid>> {
    let root = HostPid(pid);
    if !Path::new(&format!("/proc/{pid}")).exists() {
        bail!("there is no process {pid}");
    }
    let mut found = vec![root];
    let mut next = 0;
    while let Some(&process) = found.get(next) {
        next += 1;
        let Ok(threads) = std::fs::read_dir(format!("/proc/{process}/task")) else { continue };
        for thread in threads.flatten() {
            let tid = thread.file_name().to_str().and_then(|name| name.parse().ok());
            let Some(tid) = tid.map(HostPid) else { continue };
            found.extend(thread_info::children(tid).unwrap_or_default());
        }
    }
    Ok(found)
}

/// Looks at `processes`, of which the first is the oldest. `own_tracer` is not in the way.
pub fn look(
    processes: &[HostPid],
    rules: &FileRules,
    own_tracer: i32,
) -> anyhow::Result<Vec<Obstacle>> {
    let Some(&root) = processes.first() else { return Ok(Vec::new()) };
    thread_info::status(root).with_context(|| format!("look at process {root}"))?;
    let mut found = Vec::new();
    let (mut buffer, mut lines) = (Vec::new(), Vec::new());
    for &pid in processes {
        // One that has ended meanwhile is in nobody's way.
        let Ok(status) = thread_info::status(pid) else { continue };
        let name = format!("process {pid} ({})", String::from_utf8_lossy(&status.name));
        if status.tracer != 0 && status.tracer != own_tracer {
            let what = format!("{name} is traced (ptrace) by process {}", status.tracer);
            found.push(obstacle(what, "end the debugger; a process can have one tracer only"));
        }
        if status.state == b'Z' && status.threads > 1 {
            let what = format!("{name}: its first thread has ended before the others");
            found.push(obstacle(what, "let main() wait for the threads"));
        }
        found.extend(namespaces(root, pid, &name));
        found.extend(parent_memory(&status, pid, processes, &name));
        if proc_maps::read(pid, &mut buffer, &mut lines).is_ok() {
            found.extend(mappings(&lines, rules, &name));
        }
        found.extend(descriptors(pid, rules, &name));
        let timers = std::fs::read_to_string(format!("/proc/{pid}/timers")).unwrap_or_default();
        let timers = timers.lines().filter(|line| line.starts_with("ID:")).count();
        if timers > TIMERS_MAX {
            let what = format!("{name} has {timers} POSIX timers, more than {TIMERS_MAX}");
            found.push(obstacle(what, "use fewer, or timerfd_create(2)"));
        }
    }
    found.extend(leases(processes));
    found.extend(outside_peers(processes));
    Ok(found)
}

fn namespaces(root: HostPid, pid: HostPid, name: &str) -> Vec<Obstacle> {
    let link = |pid: HostPid, kind: &str| std::fs::read_link(format!("/proc/{pid}/ns/{kind}")).ok();
    let kinds = ["pid", "mnt", "net", "ipc", "uts", "user", "time", "cgroup"];
    let differ = |kind: &&str| {
        let (one, other) = (link(root, kind), link(pid, kind));
        one.is_some() && other.is_some() && one != other
    };
    let own: Vec<&str> = kinds.iter().copied().filter(differ).collect();
    if own.is_empty() {
        return Vec::new();
    }
    let what =
        format!("{name} is in namespaces of its own ({}), as containers are", own.join(", "));
    vec![obstacle(what, "run what is inside under Hotspare, not what makes the container")]
}

fn parent_memory(
    status: &thread_info::Status,
    pid: HostPid,
    processes: &[HostPid],
    name: &str,
) -> Option<Obstacle> {
    let parent = HostPid(status.parent);
    let shares = processes.contains(&parent)
        && thread_info::share_memory(parent, pid).is_ok_and(|shares| shares);
    let what = format!("{name} shares its memory with its parent (CLONE_VM)");
    shares.then(|| obstacle(what, "ordinary fork(2) or threads; vfork(2) before execve(2) is fine"))
}

fn mappings(lines: &[MapLine], rules: &FileRules, name: &str) -> Vec<Obstacle> {
    let mut found = BTreeMap::new();
    for line in lines.iter().filter(|line| !is_shared_memory(line)) {
        let (path, deleted) = match line.name.strip_suffix(" (deleted)") {
            Some(path) => (path, true),
            None => (line.name.as_str(), false),
        };
        let compared = rules.standing(path) == Standing::Compared;
        let (why, way_out) = if path.starts_with("/anon_hugepage") {
            ("huge pages of hugetlbfs cannot be tracked", "use transparent huge pages")
        } else if path.starts_with("/secretmem") {
            ("secret memory cannot be read from outside", SEE)
        } else if path.starts_with("/[aio]") {
            ("kernel AIO: requests in flight cannot be seen", "switch AIO off in the program")
        } else if path.starts_with("anon_inode:") || path.starts_with("/[") {
            ("memory of a kernel object (io_uring, perf, KVM …)", SEE)
        } else if path.starts_with("/dev/shm/") && line.shared && compared {
            ("shared memory in /dev/shm is not carried", "memfd_create(2) or System V segments")
        } else if path.starts_with("/dev/") && line.shared && path != "/dev/zero" {
            ("memory of a device stays with the device", SEE)
        } else if deleted && path.starts_with('/') && compared {
            let way_out = "restart the program (was it upgraded?), or --files replicate:DIR";
            ("it was deleted or replaced since it was mapped", way_out)
        } else {
            continue;
        };
        let what = format!("{name} has {path} mapped: {why}");
        found.insert(path.to_owned(), obstacle(what, way_out));
    }
    found.into_values().collect()
}

fn descriptors(pid: HostPid, rules: &FileRules, name: &str) -> Vec<Obstacle> {
    let Ok(entries) = std::fs::read_dir(format!("/proc/{pid}/fd")) else { return Vec::new() };
    let mut found = Vec::new();
    for entry in entries.flatten() {
        let number = entry.file_name().to_string_lossy().into_owned();
        // Closed meanwhile: nobody's obstacle.
        let Ok(link) = std::fs::read_link(entry.path()) else { continue };
        let Some(link) = link.to_str() else {
            let what = format!("{name}, descriptor {number}: {} is not UTF-8", link.display());
            found.push(obstacle(what, "rename the file"));
            continue;
        };
        let refused = match link.starts_with('/') {
            true => with_path(pid, &number, link, rules),
            false => without_path(pid, &number, link),
        };
        if let Some((what, way_out)) = refused {
            found.push(obstacle(format!("{name}, descriptor {number}: {what}"), way_out));
        }
    }
    found
}

/// What is refused, and the way out.
type Refused = Option<(String, String)>;

/// The two halves of a refusal in one sentence.
pub fn halves(error: &ObjectError) -> (String, String) {
    let text = error.to_string();
    match text.split_once("; ") {
        Some((what, way_out)) => (what.to_owned(), way_out.to_owned()),
        None => (text, SEE.to_owned()),
    }
}

fn without_path(pid: HostPid, number: &str, link: &str) -> Refused {
    if let Err(error) = class::by_link(link) {
        return Some(halves(&error));
    }
    if !link.starts_with("socket:[") {
        return None;
    }
    let protocol = xattr::socket_protocol(pid, number.parse().ok()?).ok()?;
    let known = ["TCP", "UDP", "UNIX", "NETLINK", "MPTCP"];
    let inode = link.trim_start_matches("socket:[").trim_end_matches(']');
    if !known.iter().any(|start| protocol.starts_with(start)) || protocol.contains("LITE") {
        let what = format!("a socket of protocol {protocol} ({link}) is not known to us");
        return Some((what, SEE.to_owned()));
    }
    if protocol == "NETLINK" {
        // sk Eth Pid Groups Rmem Wmem Dump Locks Drops Inode
        let table = std::fs::read_to_string(format!("/proc/{pid}/net/netlink")).ok()?;
        let mut rows = table.lines().map(|row| row.split_ascii_whitespace().collect::<Vec<_>>());
        let row = rows.find(|row| row.last() == Some(&inode))?;
        let kind: i32 = row.get(1)?.parse().ok()?;
        let carried = [libc::NETLINK_ROUTE, libc::NETLINK_SOCK_DIAG].contains(&kind);
        let what = format!("a netlink socket of protocol {kind}, whose state is not known");
        return (!carried).then(|| (what, SEE.to_owned()));
    }
    None
}

fn with_path(pid: HostPid, number: &str, link: &str, rules: &FileRules) -> Refused {
    let (path, deleted) = match link.strip_suffix(" (deleted)") {
        Some(path) => (path, true),
        None => (link, false),
    };
    let info = std::fs::read_to_string(format!("/proc/{pid}/fdinfo/{number}")).ok()?;
    let flags = info.lines().find_map(|line| line.strip_prefix("flags:"))?;
    let flags = i32::from_str_radix(flags.trim(), 8).ok()?;
    let stat = stat(pid, number)?;
    let some = |what: &str, way_out: &str| Some((format!("{path} {what}"), way_out.to_owned()));
    let is_path = flags & libc::O_PATH != 0;
    let compared = rules.standing(path) == Standing::Compared;
    match stat.kind() {
        _ if is_path => None,
        libc::S_IFBLK => some("is a block device, which cannot be moved", SEE),
        libc::S_IFCHR => match device::classify(path, &stat) {
            Err(error) => Some(halves(&error)),
            Ok(class::Class::Terminal) if !matches!(number, "0" | "1" | "2") => {
                some("is a terminal of this host", "pass it as descriptor 0, 1 or 2, or not at all")
            }
            Ok(_) => None,
        },
        libc::S_IFREG if path.starts_with("/memfd:") || path.starts_with("/proc/") => None,
        libc::S_IFREG if path.starts_with("/secretmem") => {
            some("is secret memory, which cannot be read from outside", SEE)
        }
        libc::S_IFREG if !compared => None,
        libc::S_IFREG if deleted => some(
            "was deleted while open, so the spare cannot have it",
            "restart the program, or --files replicate:DIR for its directory",
        ),
        libc::S_IFREG if flags & libc::O_ACCMODE != libc::O_RDONLY => {
            let directory = Path::new(path).parent().unwrap_or(Path::new("/")).display();
            some("is open for writing", &format!("--files replicate:{directory} or shared:"))
        }
        libc::S_IFIFO if compared => some(
            "is a FIFO outside of --files: the spare's is another one",
            "put it into a replicated directory",
        ),
        libc::S_IFDIR if deleted => some("was removed while open", "close it before removing it"),
        _ => None,
    }
}

fn stat(pid: HostPid, number: &str) -> Option<FileStat> {
    let directory = std::fs::File::open(format!("/proc/{pid}/fd")).ok()?;
    descriptor::stat_at(directory.as_fd(), &CString::new(number).ok()?, false).ok()
}

/// F_SETLEASE leases (`/proc/locks`).
fn leases(processes: &[HostPid]) -> Vec<Obstacle> {
    let locks = std::fs::read_to_string("/proc/locks").unwrap_or_default();
    let lease = |line: &str| {
        let fields: Vec<&str> = line.split_ascii_whitespace().collect();
        let holder = fields.get(4)?.parse().ok().map(HostPid)?;
        let held = fields.get(1) == Some(&"LEASE") && processes.contains(&holder);
        let what = format!("process {holder} holds a file lease (F_SETLEASE)");
        held.then(|| obstacle(what, "switch leases off in the program"))
    };
    locks.lines().filter_map(lease).collect()
}

/// Connections to UNIX sockets of processes that do not belong to these: an X server, a bus.
fn outside_peers(processes: &[HostPid]) -> Vec<Obstacle> {
    let own_net = std::fs::read_link("/proc/self/ns/net").ok();
    let mut sockets = BTreeSet::new();
    for pid in processes {
        if std::fs::read_link(format!("/proc/{pid}/ns/net")).ok() != own_net {
            return Vec::new();
        }
        let entries = std::fs::read_dir(format!("/proc/{pid}/fd")).into_iter().flatten().flatten();
        let links = entries.filter_map(|entry| std::fs::read_link(entry.path()).ok());
        sockets.extend(links.filter_map(|link| {
            let inode = link.to_str()?.strip_prefix("socket:[")?.strip_suffix(']')?;
            inode.parse::<u64>().ok()
        }));
    }
    let Ok(all) = SockDiag::open().and_then(|diag| diag.unix_sockets()) else { return Vec::new() };
    let mut names = BTreeSet::new();
    for peer in sockets.iter().filter_map(|inode| all.get(inode)?.peer) {
        let Some(entry) = all.get(&peer).filter(|_| !sockets.contains(&peer)) else { continue };
        if entry.name.is_empty() {
            continue;
        }
        names.insert(String::from_utf8_lossy(&entry.name).replace('\0', "@"));
    }
    let told = names.into_iter().map(|name| {
        let is_x = name.contains("X11-unix");
        let whose = if is_x { "the X server" } else { "a server outside of the program" };
        let what = format!("it is connected to {whose} by the UNIX socket {name}");
        obstacle(what, "run that server inside, too, or the program without it")
    });
    told.collect()
}
