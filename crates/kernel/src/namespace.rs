//! Network and mount namespaces as handles: a simulated host on this machine.
//!
//! No namespace here has a name in the file system. It lives as long as a descriptor or a process
//! does, so whatever happens to the owner, nothing is left behind.

use std::ffi::{CString, OsStr};
use std::fs::File;
use std::io;
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::MetadataExt;
use std::os::unix::process::CommandExt;
use std::process::Command;
use std::sync::Arc;

use nix::sched::{CloneFlags, setns, unshare};

/// A network namespace and a mount namespace, kept alive by descriptors.
#[derive(Debug)]
pub struct Namespaces {
    net: File,
    mnt: File,
}

/// Runs `work` on a thread of its own and waits for it: whoever enters a namespace does so with a
/// thread, and cannot always come back. Fails where no thread can be started.
pub fn on_a_thread<T: Send>(work: impl FnOnce() -> T + Send) -> io::Result<T> {
    std::thread::scope(|scope| {
        let visitor = std::thread::Builder::new().name("visitor".into());
        let visitor = visitor.spawn_scoped(scope, work)?;
        Ok(visitor.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic)))
    })
}

impl Namespaces {
    /// Makes a fresh pair. `furnish` runs on a thread inside them, before anyone else can enter;
    /// mounts it makes stay inside, since propagation is cut first.
    ///
    /// Needs CAP_SYS_ADMIN. On failure nothing remains.
    pub fn create<F>(furnish: F) -> io::Result<Namespaces>
    where
        F: FnOnce() -> io::Result<()> + Send,
    {
        on_a_thread(|| {
            unshare(CloneFlags::CLONE_NEWNET | CloneFlags::CLONE_NEWNS)?;
            cut_propagation()?;
            furnish()?;
            Ok(Namespaces {
                net: File::open("/proc/thread-self/ns/net")?,
                mnt: File::open("/proc/thread-self/ns/mnt")?,
            })
        })?
    }

    /// Moves the calling thread into both namespaces, for good. Its working directory becomes
    /// `/` and is no longer shared with other threads (setns(2), CLONE_NEWNS).
    pub fn enter(&self) -> io::Result<()> {
        unshare(CloneFlags::CLONE_FS)?;
        setns(self.net.as_fd(), CloneFlags::CLONE_NEWNET)?;
        setns(self.mnt.as_fd(), CloneFlags::CLONE_NEWNS)?;
        Ok(())
    }

    /// Inode number of the network namespace: equal to that of `/proc/PID/ns/net` for every
    /// process inside.
    pub fn net_inode(&self) -> io::Result<u64> {
        Ok(self.net.metadata()?.ino())
    }

    /// A path under which other programs can open the network namespace while this handle lives.
    pub fn net_path(&self) -> String {
        format!("/proc/{}/fd/{}", std::process::id(), self.net.as_raw_fd())
    }

    /// Makes `command` start inside: in these namespaces, in the working directory `dir`, and in
    /// the cgroup whose `cgroup.procs` is `cell`. The child is in the cgroup before its first
    /// instruction, so it has no descendant outside.
    pub fn confine(
        self: &Arc<Self>,
        command: &mut Command,
        dir: &OsStr,
        cell: OwnedFd,
    ) -> io::Result<()> {
        let namespaces = Arc::clone(self);
        let dir = CString::new(dir.as_bytes())?;
        let enter = move || {
            nix::unistd::write(&cell, b"0")?;
            setns(namespaces.net.as_fd(), CloneFlags::CLONE_NEWNET)?;
            setns(namespaces.mnt.as_fd(), CloneFlags::CLONE_NEWNS)?;
            nix::unistd::chdir(dir.as_c_str())?;
            Ok(())
        };
        // SAFETY: between fork and exec the closure makes system calls only; it neither allocates
        // nor takes a lock. Its captures were made before the fork.
        unsafe { command.pre_exec(enter) };
        Ok(())
    }
}

/// Mounts made from here on are seen in this mount namespace only.
fn cut_propagation() -> io::Result<()> {
    use nix::mount::{MsFlags, mount};
    mount(None::<&str>, "/", None::<&str>, MsFlags::MS_REC | MsFlags::MS_PRIVATE, None::<&str>)?;
    Ok(())
}

/// True if the process `pid` is in the network namespace with this inode number; false if it is
/// not, or is gone.
pub fn is_in_net(pid: i32, net_inode: u64) -> bool {
    std::fs::metadata(format!("/proc/{pid}/ns/net")).is_ok_and(|ns| ns.ino() == net_inode)
}
