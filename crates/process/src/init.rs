//! PID 1 of the guest: makes its namespaces, starts its first process, reaps its orphans.
//!
//! The same program runs on both hosts, so it is not part of the guest's state. The agent starts
//! it by executing itself with the hidden command `init SOCKET PIDFD`, two descriptor numbers:
//!
//! ```text
//! agent ──fork, exec──▶ outer: unshare, clock offsets ──clone(CLONE_PARENT)──▶ init (PID 1)
//!   ▲                     └─ exits                                                │
//!   └────────── requests and answers over a UNIX seqpacket socket ────────────────┘
//! ```
//!
//! Descriptors travel in neither direction: each side holds a pidfd of the other and takes what it
//! is told the number of (pidfd_getfd(2)).
//!
//! Init ends when the agent does (its socket closes, and `PR_SET_PDEATHSIG`), and the kernel then
//! kills everything in the pid namespace.

use std::fs::File;
use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::path::PathBuf;
use std::process::{Command, Stdio};

use hotspare_image::tree::GuestPid;
use hotspare_kernel::descriptor::{Soon, closed_early};
use hotspare_kernel::{HostPid, KernelError, pidfd, socket, spawn};
use minicbor::{Decode, Encode};
use nix::sys::socket::{MsgFlags, recv, send};

mod pid1;

pub use pid1::main;

/// Longest message, bytes.
const MESSAGE_BYTES: usize = 256 * 1024;

/// Why init did not do what was asked.
#[derive(Debug, thiserror::Error)]
pub enum InitError {
    /// {0}
    #[error(transparent)]
    Kernel(#[from] KernelError),
    /// cannot {verb}: {source}
    #[error("cannot {verb}: {source}")]
    Io {
        /// Verb and noun.
        verb: &'static str,
        /// The system's answer.
        source: io::Error,
    },
    /// the guest's init could not {what}
    #[error("the guest's init could not {what}")]
    Refused {
        /// Verb, noun and the system's answer.
        what: String,
    },
    /// the guest's init ended
    #[error("the guest's init ended")]
    Ended,
}

type Result<T> = std::result::Result<T, InitError>;

fn io_error<E: Into<io::Error>>(verb: &'static str) -> impl FnOnce(E) -> InitError {
    move |source| InitError::Io { verb, source: source.into() }
}

/// A path the guest may write to.
#[derive(Clone, Debug, PartialEq, Eq, Encode, Decode)]
#[cbor(array)]
pub struct WritablePath {
    /// What is to be seen there: the same path for a shared directory, the mount point of the
    /// agent's file system for a replicated one.
    #[n(0)]
    pub source: String,
    /// Where the guest sees it; must exist.
    #[n(1)]
    pub target: String,
}

/// How far the guest's clocks are ahead of the host's, ns (time_namespaces(7)).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Encode, Decode)]
#[cbor(array)]
pub struct ClockOffsets {
    /// `CLOCK_MONOTONIC`.
    #[n(0)]
    pub monotonic_ns: i64,
    /// `CLOCK_BOOTTIME`.
    #[n(1)]
    pub boottime_ns: i64,
}

/// What init sets up.
#[derive(Clone, Debug, Encode, Decode)]
#[cbor(array)]
pub struct Surroundings {
    /// Clocks of the time namespace.
    #[n(0)]
    pub clocks: ClockOffsets,
    /// Host name; `None` keeps the host's.
    #[n(1)]
    pub host_name: Option<String>,
    /// Domain name; `None` keeps the host's.
    #[n(2)]
    pub domain_name: Option<String>,
    /// Where the guest may write; everything else is read-only.
    #[n(3)]
    pub writable: Vec<WritablePath>,
}

/// How to start init.
#[derive(Clone, Debug)]
pub struct InitConfig {
    /// The program; by default the one that is running.
    pub program: PathBuf,
    /// Its arguments, which must lead it to [`main`]; two descriptor numbers are appended.
    pub arguments: Vec<String>,
    /// What it sets up.
    pub surroundings: Surroundings,
}

impl Default for InitConfig {
    fn default() -> Self {
        Self {
            program: "/proc/self/exe".into(),
            arguments: vec!["init".into()],
            surroundings: Surroundings {
                clocks: ClockOffsets::default(),
                host_name: None,
                domain_name: None,
                writable: Vec::new(),
            },
        }
    }
}

/// A program to start as the guest's first process.
#[derive(Clone, Debug, Default, Encode, Decode)]
#[cbor(array)]
pub struct FirstProgram {
    /// Program (found along `PATH` of `environment`) and arguments.
    #[n(0)]
    pub arguments: Vec<String>,
    /// `NAME=value`.
    #[n(1)]
    pub environment: Vec<String>,
    /// Working directory.
    #[n(2)]
    pub directory: String,
    /// User and group; `None` keeps the agent's.
    #[n(3)]
    pub user: Option<(u32, u32)>,
}

#[derive(Debug, Encode, Decode)]
enum Request {
    #[n(0)]
    SetUp(#[n(0)] Surroundings),
    #[n(1)]
    Spawn {
        #[n(0)]
        program: FirstProgram,
        #[n(1)]
        standard: [i32; 3],
        #[n(2)]
        set_tid: Option<i32>,
    },
    /// A process that waits for ever, with the tools of a ghost at these two descriptors: a pidfd
    /// of the agent and the idle program.
    #[n(2)]
    SpawnIdle {
        #[n(0)]
        set_tid: Option<i32>,
        #[n(1)]
        tools: [i32; 2],
    },
    /// What was offered has been taken.
    #[n(3)]
    Taken,
    #[n(4)]
    LastPid(#[n(0)] i32),
    /// Reap what has ended.
    #[n(6)]
    Reap,
    #[n(5)]
    Names {
        #[n(0)]
        host: String,
        #[n(1)]
        domain: String,
    },
}

#[derive(Debug, Encode, Decode)]
enum Answer {
    #[n(0)]
    Done,
    /// The outer process made PID 1.
    #[n(1)]
    Made {
        #[n(0)]
        pid: i32,
    },
    /// A child is there; descriptors of init to take: its pidfd, our end of its gate.
    #[n(2)]
    Offered {
        #[n(0)]
        pidfd: i32,
        #[n(1)]
        gate: i32,
    },
    #[n(3)]
    Failed {
        #[n(0)]
        what: String,
    },
}

fn send_message(socket: BorrowedFd<'_>, message: &impl Encode<()>) -> Result<()> {
    let bytes = minicbor::to_vec(message).unwrap_or_default();
    if bytes.len() > MESSAGE_BYTES {
        return Err(InitError::Refused { what: "take so many arguments".into() });
    }
    match send(socket.as_raw_fd(), &bytes, MsgFlags::MSG_NOSIGNAL) {
        Ok(_) => Ok(()),
        Err(nix::Error::EPIPE | nix::Error::ECONNRESET) => Err(InitError::Ended),
        Err(error) => Err(io_error("talk to init")(error)),
    }
}

fn receive_message<T: for<'b> Decode<'b, ()>>(socket: BorrowedFd<'_>) -> Result<T> {
    let mut buffer = vec![0u8; MESSAGE_BYTES];
    let bytes = loop {
        match recv(socket.as_raw_fd(), &mut buffer, MsgFlags::empty()) {
            Ok(0) | Err(nix::Error::ECONNRESET) => return Err(InitError::Ended),
            Ok(bytes) => break bytes,
            Err(nix::Error::EINTR) => {}
            Err(error) => return Err(io_error("listen to init")(error)),
        }
    };
    minicbor::decode(&buffer[..bytes])
        .map_err(|error| InitError::Refused { what: format!("say something sensible: {error}") })
}

/// PID 1 of a guest, held by the agent. Dropping it ends the guest.
#[derive(Debug)]
pub struct Init {
    socket: OwnedFd,
    host: HostPid,
    pidfd: OwnedFd,
}

/// A process that waits to be let go.
#[derive(Debug)]
pub struct Newborn {
    /// Its number on the host.
    pub host: HostPid,
    /// Stands for it.
    pub pidfd: OwnedFd,
    gate: OwnedFd,
}

impl Newborn {
    /// Lets it execute its program.
    pub fn go(&self) -> Result<()> {
        send(self.gate.as_raw_fd(), &[1], MsgFlags::MSG_NOSIGNAL)
            .map(drop)
            .map_err(io_error("start the program"))
    }

    /// Why it could not execute its program; to be asked when it has ended.
    pub fn failure(&self) -> Option<String> {
        let mut text = [0u8; 1024];
        let flags = MsgFlags::MSG_DONTWAIT;
        let bytes =
            recv(self.gate.as_raw_fd(), &mut text, flags).ok().filter(|bytes| *bytes > 0)?;
        Some(String::from_utf8_lossy(&text[..bytes]).into_owned())
    }
}

impl Init {
    /// Makes the namespaces and PID 1 in them.
    ///
    /// Must be called on the thread that traces the guest: init is killed when that thread ends.
    pub fn start(config: InitConfig) -> Result<Self> {
        let (ours, theirs) = socket::pair(libc::AF_UNIX, libc::SOCK_SEQPACKET)?;
        let ours = closed_early(ours, Soon::Guest);
        let own = pidfd::open(HostPid(std::process::id() as i32))?;
        let mut command = Command::new(&config.program);
        command.args(&config.arguments).stdin(Stdio::null()).stdout(Stdio::null());
        command.args([&theirs, &own].map(|fd| fd.as_raw_fd().to_string()));
        spawn::pass_descriptors(&mut command, vec![theirs, own]);
        let mut outer = command.spawn().map_err(io_error("start the guest's init"))?;
        // The closure owns our copy of init's end: while it is open here, we would not see the
        // end of init.
        drop(command);
        send_message(ours.as_fd(), &Request::SetUp(config.surroundings))?;
        // The maker says which number PID 1 has, PID 1 that it is ready: in either order.
        let (mut made, mut ready) = (None, false);
        while made.is_none() || !ready {
            match receive_message(ours.as_fd()) {
                Ok(Answer::Made { pid }) => made = Some(HostPid(pid)),
                Ok(Answer::Done) => ready = true,
                other => {
                    let _ = outer.wait();
                    return Err(unwanted(other?));
                }
            }
        }
        outer.wait().map_err(io_error("wait for the maker of init"))?;
        let host = made.ok_or(InitError::Ended)?;
        Ok(Self { pidfd: pidfd::open(host)?, socket: ours, host })
    }

    /// Ends the guest at once. Its end, and those of its children that are traced, are still to be
    /// waited for.
    pub fn kill(&self) {
        let pid = nix::unistd::Pid::from_raw(self.host.0);
        // It may have ended already; its number is ours until it has been waited for.
        let _ = nix::sys::signal::kill(pid, nix::sys::signal::Signal::SIGKILL);
    }

    /// Its number on the host.
    pub fn host_pid(&self) -> HostPid {
        self.host
    }

    fn answer(&self) -> Result<Answer> {
        receive_message(self.socket.as_fd())
    }

    fn expect_done(&self) -> Result<()> {
        match self.answer()? {
            Answer::Done => Ok(()),
            other => Err(unwanted(other)),
        }
    }

    fn take_offer(&self) -> Result<Newborn> {
        let (child, gate) = match self.answer()? {
            Answer::Offered { pidfd, gate } => (pidfd, gate),
            other => return Err(unwanted(other)),
        };
        let child = pidfd::get_fd(self.pidfd.as_fd(), child)?;
        let gate = pidfd::get_fd(self.pidfd.as_fd(), gate)?;
        send_message(self.socket.as_fd(), &Request::Taken)?;
        Ok(Newborn { host: pid_of(child.as_fd())?, pidfd: child, gate })
    }

    /// Forks the guest's first process with these standard descriptors and number. It waits for
    /// [`Newborn::go`], so that it can be seized before it executes the program.
    pub fn spawn(
        &self,
        program: FirstProgram,
        standard: [BorrowedFd<'_>; 3],
        number: Option<GuestPid>,
    ) -> Result<Newborn> {
        let standard = standard.map(|fd| fd.as_raw_fd());
        let set_tid = number.map(|number| number.0);
        send_message(self.socket.as_fd(), &Request::Spawn { program, standard, set_tid })?;
        self.take_offer()
    }

    /// Forks a child of init with this number that waits for [`Newborn::go`], then executes the
    /// idle program ([`spawn::idle_program`]). It has two descriptors: `tools[0]` is a pidfd of
    /// the agent, `tools[1]` the idle program.
    pub fn spawn_idle(&self, number: Option<GuestPid>, tools: [i32; 2]) -> Result<Newborn> {
        let set_tid = number.map(|number| number.0);
        send_message(self.socket.as_fd(), &Request::SpawnIdle { set_tid, tools })?;
        self.take_offer()
    }

    /// Sets the number after which the pid namespace looks for the next free one.
    pub fn set_last_pid(&self, last: i32) -> Result<()> {
        send_message(self.socket.as_fd(), &Request::LastPid(last))?;
        self.expect_done()
    }

    /// Returns when init has reaped every child that has ended.
    pub fn reap(&self) -> Result<()> {
        send_message(self.socket.as_fd(), &Request::Reap)?;
        self.expect_done()
    }

    /// Sets host and domain name.
    pub fn set_names(&self, host: &str, domain: &str) -> Result<()> {
        let (host, domain) = (host.to_owned(), domain.to_owned());
        send_message(self.socket.as_fd(), &Request::Names { host, domain })?;
        self.expect_done()
    }

    /// Handles on the guest's namespaces.
    pub fn namespaces(&self) -> Result<GuestNamespaces> {
        let open = |kind: &str| {
            File::open(format!("/proc/{}/ns/{kind}", self.host))
                .map_err(io_error("open the guest's namespace"))
        };
        Ok(GuestNamespaces {
            net: open("net")?,
            mnt: open("mnt")?,
            ipc: open("ipc")?,
            uts: open("uts")?,
            pid: open("pid")?,
        })
    }
}

/// The guest's namespaces as descriptors; they live as long as these do.
#[derive(Debug)]
pub struct GuestNamespaces {
    /// Network.
    pub net: File,
    /// Mounts.
    pub mnt: File,
    /// System V IPC and message queues.
    pub ipc: File,
    /// Names.
    pub uts: File,
    /// Process numbers.
    pub pid: File,
}

impl GuestNamespaces {
    /// Moves the calling thread into the guest's mount, network, ipc and uts namespaces for good.
    /// Its root and working directory become the guest's.
    pub fn enter(&self) -> io::Result<()> {
        use nix::sched::{CloneFlags, setns, unshare};
        unshare(CloneFlags::CLONE_FS)?;
        setns(&self.net, CloneFlags::CLONE_NEWNET)?;
        setns(&self.ipc, CloneFlags::CLONE_NEWIPC)?;
        setns(&self.uts, CloneFlags::CLONE_NEWUTS)?;
        setns(&self.mnt, CloneFlags::CLONE_NEWNS)?;
        Ok(())
    }

    /// Runs `work` on a thread inside the namespaces and waits for it.
    pub fn run<T: Send>(&self, work: impl FnOnce() -> T + Send) -> io::Result<T> {
        hotspare_kernel::namespace::on_a_thread(|| self.enter().map(|()| work()))?
    }
}

fn unwanted(answer: Answer) -> InitError {
    match answer {
        Answer::Failed { what } => InitError::Refused { what },
        other => InitError::Refused { what: format!("answer to the point: {other:?}") },
    }
}

/// The process behind a pidfd, in the numbering of our /proc.
fn pid_of(pidfd: BorrowedFd<'_>) -> Result<HostPid> {
    let path = format!("/proc/self/fdinfo/{}", pidfd.as_raw_fd());
    let text = std::fs::read_to_string(path).map_err(io_error("read pidfd"))?;
    text.lines()
        .find_map(|line| line.strip_prefix("Pid:")?.trim().parse().ok())
        .filter(|pid| *pid > 0)
        .map(HostPid)
        .ok_or(InitError::Ended)
}
