//! What we ask of the kernel, each feature tried for real.

use std::fs::OpenOptions;
use std::os::fd::{AsFd, AsRawFd};

use anyhow::{Context, bail};
use hotspare_image::tree::GuestPid;
use hotspare_kernel::netlink::Netlink;
use hotspare_kernel::pagemap::{Pagemap, Query, category};
use hotspare_kernel::sock_diag::SockDiag;
use hotspare_kernel::{HostPid, descriptor, pidfd, socket, tcp, userfaultfd};
use hotspare_process::guest::Guest;
use hotspare_process::init::{FirstProgram, Init, InitConfig};

use crate::preflight::{Obstacle, obstacle};

/// A feature of the kernel.
pub struct Feature {
    /// As the manual pages call it, and what it is for.
    pub name: &'static str,
    probe: fn() -> anyhow::Result<()>,
    way_out: &'static str,
}

/// In the order in which a reader can do something about them.
pub const ALL: [Feature; 12] = [
    Feature {
        name: "root: tracing, namespaces, rebuilding processes",
        probe: root,
        way_out: "run it as root, outside of containers that take privileges away",
    },
    Feature {
        name: "userfaultfd with WP_ASYNC: which pages are written",
        probe: write_tracking,
        way_out: "Linux 6.7 or newer with CONFIG_USERFAULTFD",
    },
    Feature {
        name: "PAGEMAP_SCAN: the same, read and re-armed in one call",
        probe: pagemap_scan,
        way_out: "Linux 6.7 or newer",
    },
    Feature {
        name: "pidfd_getfd: the guest's open files",
        probe: pidfd_getfd,
        way_out: "Linux 5.6 or newer; a security module may forbid it",
    },
    Feature {
        name: "kcmp and /proc/PID/timers: what processes share, their timers",
        probe: checkpoint_restore,
        way_out: "a kernel with CONFIG_CHECKPOINT_RESTORE and CONFIG_KCMP",
    },
    Feature {
        name: "TCP_REPAIR: established connections",
        probe: tcp_repair,
        way_out: "a kernel with CONFIG_CHECKPOINT_RESTORE",
    },
    Feature {
        name: "sock_diag for UNIX sockets: who is connected to whom",
        probe: sock_diag,
        way_out: "modprobe unix_diag (CONFIG_UNIX_DIAG)",
    },
    Feature {
        name: "rtnetlink and packet sockets: the service address",
        probe: network,
        way_out: "a kernel with CONFIG_PACKET; veth is needed, too (modprobe veth)",
    },
    Feature {
        name: "FUSE: replicated directories",
        probe: fuse,
        way_out: "modprobe fuse (CONFIG_FUSE_FS)",
    },
    Feature {
        name: "System V IPC and POSIX message queues, each guest its own",
        probe: ipc,
        way_out: "a kernel with CONFIG_SYSVIPC, CONFIG_POSIX_MQUEUE, CONFIG_IPC_NS",
    },
    Feature {
        name: "pid, mount, net, ipc, uts and time namespaces",
        probe: namespaces,
        way_out: "a kernel with these; CONFIG_TIME_NS is the rare one",
    },
    Feature {
        name: "clone3 with set_tid, ptrace, a tracked process from end to end",
        probe: trial_guest,
        way_out: "set /proc/sys/kernel/yama/ptrace_scope below 3; end seccomp and other \
                  security rules that forbid ptrace to root",
    },
];

/// The last ones make namespaces and processes.
const TRIALS: usize = 2;

impl Feature {
    /// Tries it.
    pub fn probe(&self) -> Option<Obstacle> {
        let error = (self.probe)().err()?;
        Some(obstacle(format!("{}: {error:#}", self.name), self.way_out))
    }
}

/// What is missing. Without root nothing else can be told. Unless `thorough`, no trial guest is
/// made: the real one is about to be.
pub fn missing(thorough: bool) -> Vec<Obstacle> {
    if let Some(first) = ALL[0].probe() {
        return vec![first];
    }
    let trials = if thorough { 0 } else { TRIALS };
    ALL[1..ALL.len() - trials].iter().filter_map(Feature::probe).collect()
}

/// What may become a problem but is none yet.
pub fn notes() -> Vec<String> {
    let mut notes = Vec::new();
    let read = |path: &str| std::fs::read_to_string(path).unwrap_or_default();
    if read("/proc/sys/vm/overcommit_memory").trim() == "2" {
        notes.push(
            "memory is not overcommitted here (vm.overcommit_memory = 2): a spare needs as much \
             memory as the guest has mapped, not only what it uses"
                .to_owned(),
        );
    }
    if !std::path::Path::new("/dev/shm").is_dir() {
        notes.push("there is no /dev/shm here; the guest will have one".to_owned());
    }
    notes.extend(hotspare_process::capture::prepare_marks());
    notes
}

fn root() -> anyhow::Result<()> {
    if !nix::unistd::geteuid().is_root() {
        bail!("the effective user is {}", nix::unistd::geteuid());
    }
    let status = hotspare_kernel::thread_info::status(own())?;
    // CAP_NET_ADMIN, CAP_SYS_PTRACE, CAP_SYS_ADMIN (linux/capability.h).
    for (number, name) in [(12, "CAP_NET_ADMIN"), (19, "CAP_SYS_PTRACE"), (21, "CAP_SYS_ADMIN")] {
        if status.capabilities[2] >> number & 1 == 0 {
            bail!("{name} was taken away");
        }
    }
    Ok(())
}

fn own() -> HostPid {
    HostPid(std::process::id() as i32)
}

fn write_tracking() -> anyhow::Result<()> {
    Ok(userfaultfd::probe()?)
}

fn pagemap_scan() -> anyhow::Result<()> {
    let page = Box::new([1u8; 8192]);
    let address = page.as_ptr() as u64 & !4095;
    let query = Query { any_of: category::PRESENT, report: category::PRESENT, ..Query::default() };
    let mut found = Vec::new();
    Pagemap::open(own())?.scan(address, address + 4096, query, &mut found)?;
    if found.is_empty() {
        bail!("a page that was just written is not reported");
    }
    Ok(())
}

fn pidfd_getfd() -> anyhow::Result<()> {
    let (read, _write) = descriptor::pipe(0)?;
    let own = pidfd::open(own())?;
    pidfd::get_fd(own.as_fd(), read.as_raw_fd())?;
    Ok(())
}

fn checkpoint_restore() -> anyhow::Result<()> {
    let (read, write) = descriptor::pipe(0)?;
    let order = descriptor::compare_files((own(), read.as_raw_fd()), (own(), write.as_raw_fd()))?;
    if order.is_eq() {
        bail!("kcmp takes two files for one");
    }
    std::fs::read_to_string("/proc/self/timers").context("read /proc/self/timers")?;
    Ok(())
}

fn tcp_repair() -> anyhow::Result<()> {
    let connection = socket::create(libc::AF_INET, libc::SOCK_STREAM, 0)?;
    tcp::Repair::enter(connection.as_fd())?.go_live()?;
    Ok(())
}

fn sock_diag() -> anyhow::Result<()> {
    let (_one, _other) = socket::pair(libc::AF_UNIX, libc::SOCK_STREAM)?;
    if SockDiag::open()?.unix_sockets()?.is_empty() {
        bail!("two sockets that were just made are not listed");
    }
    Ok(())
}

fn network() -> anyhow::Result<()> {
    Netlink::open()?.link("lo")?;
    hotspare_kernel::packet_tap::PacketTap::open(4096)?;
    Ok(())
}

fn fuse() -> anyhow::Result<()> {
    let device = OpenOptions::new().read(true).write(true).open("/dev/fuse");
    device.context("open /dev/fuse")?;
    let known = std::fs::read_to_string("/proc/filesystems").context("read /proc/filesystems")?;
    if !known.lines().any(|line| line.trim_start_matches("nodev").trim() == "fuse") {
        bail!("the kernel does not know the file system");
    }
    Ok(())
}

fn ipc() -> anyhow::Result<()> {
    hotspare_kernel::ipc::queue_directory()?;
    std::fs::metadata("/proc/sysvipc/shm").context("look at /proc/sysvipc")?;
    Ok(())
}

fn namespaces() -> anyhow::Result<()> {
    Init::start(InitConfig::default())?.namespaces()?;
    Ok(())
}

/// A process with a number of our choice, stopped before it runs anything, its memory tracked and
/// read once.
fn trial_guest() -> anyhow::Result<()> {
    let init = Init::start(InitConfig::default()).context("make namespaces")?;
    let nothing = OpenOptions::new().read(true).write(true).open("/dev/null")?;
    let nothing = nothing.as_fd();
    let program = FirstProgram {
        arguments: vec!["/bin/true".into()],
        directory: "/".into(),
        ..FirstProgram::default()
    };
    let number = GuestPid(300);
    let newborn = init.spawn(program, [nothing; 3], Some(number));
    let newborn = newborn.context("make a process with a given number (clone3, set_tid)")?;
    let mut guest = Guest::seize(newborn.host).context("trace it")?;
    guest.prepare().context("track its writes")?;
    guest.scan().context("find its written pages")?;
    let mut runs = Vec::new();
    guest.precopy(1 << 20, &mut runs).context("read its memory")?;
    if runs.is_empty() {
        bail!("no page of it is found written");
    }
    init.kill();
    Ok(())
}
