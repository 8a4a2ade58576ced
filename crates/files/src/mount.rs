//! Mounting and serving: mount(2) directly, as root, without helper programs.

use std::fs::File;
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::path::{Path, PathBuf};
use std::sync::Arc;

use fuser::{BackgroundSession, Config, Notifier, Session, SessionACL};
use hotspare_kernel::opener::Opener;
use nix::fcntl::OFlag;
use nix::mount::{MntFlags, MsFlags, mount, umount2};
use nix::sys::stat::Mode;

use crate::error::FilesError;
use crate::server::Server;
use crate::shared::Shared;

/// Threads that answer the kernel.
const SERVER_THREADS: usize = 4;

/// A served FUSE mount. Dropping it unmounts it where it was mounted; the server threads end when
/// no other mount namespace has it any more.
#[derive(Debug)]
pub(crate) struct Mount {
    pub notifier: Notifier,
    mountpoint: PathBuf,
    /// `st_dev` of everything in it.
    pub device: u64,
    /// Its root directory.
    root: Option<File>,
    _session: BackgroundSession,
}

impl Mount {
    /// Mounts at `mountpoint` and starts serving.
    pub fn new(shared: Arc<Shared>, mountpoint: &Path) -> Result<Mount, FilesError> {
        let failed = |doing| move |error| FilesError::mount(doing, mountpoint, error);
        // What an agent that was killed left here answers nothing but ENOTCONN.
        let left_over = std::fs::metadata(mountpoint)
            .is_err_and(|error| error.raw_os_error() == Some(libc::ENOTCONN));
        if left_over {
            let _ = umount2(mountpoint, MntFlags::MNT_DETACH);
        }
        let mountpoint_path = mountpoint.canonicalize().map_err(failed("find mount point"))?;
        let flags = OFlag::O_RDWR | OFlag::O_CLOEXEC;
        let device = nix::fcntl::open("/dev/fuse", flags, Mode::empty())
            .map_err(|error| FilesError::mount("open /dev/fuse to serve", mountpoint, error))?;
        mount_fuse(&device, &mountpoint_path)
            .map_err(|error| FilesError::mount("mount a FUSE file system", mountpoint, error))?;
        let served = serve(shared, device).and_then(|(notifier, session)| {
            // Not by ourselves: see [`Opener`].
            let root = Opener::start()?.open(&mountpoint_path, libc::O_DIRECTORY)?;
            let root = File::from(root);
            let device = device_of(&root)?;
            Ok((notifier, session, root, device))
        });
        match served {
            Ok((notifier, session, root, device)) => Ok(Mount {
                notifier,
                mountpoint: mountpoint_path,
                device,
                root: Some(root),
                _session: session,
            }),
            Err(error) => {
                let _ = umount2(&mountpoint_path, MntFlags::MNT_DETACH);
                Err(FilesError::mount("serve the FUSE file system", mountpoint, error))
            }
        }
    }

    /// The root directory of the mount.
    pub fn root(&self) -> &File {
        self.root.as_ref().unwrap_or_else(|| unreachable!("taken only by drop"))
    }
}

impl Drop for Mount {
    fn drop(&mut self) {
        self.root = None;
        // It may have been moved away, and something else be mounted there now.
        let flags = OFlag::O_PATH | OFlag::O_CLOEXEC;
        let found = nix::fcntl::open(&self.mountpoint, flags, Mode::empty()).map(File::from);
        let ours = found.is_ok_and(|f| device_of(&f).is_ok_and(|device| device == self.device));
        if ours && let Err(error) = umount2(&self.mountpoint, MntFlags::MNT_DETACH) {
            tracing::warn!("cannot unmount {}: {error}", self.mountpoint.display());
        }
    }
}

/// `st_dev` of a file, without a question to whoever serves it.
fn device_of(file: &File) -> std::io::Result<u64> {
    let stat = hotspare_kernel::descriptor::stat(file.as_fd()).map_err(std::io::Error::other)?;
    Ok(libc::makedev(stat.device.0, stat.device.1))
}

fn mount_fuse(device: &OwnedFd, mountpoint: &Path) -> nix::Result<()> {
    let options = format!(
        "fd={},rootmode=40000,user_id=0,group_id=0,allow_other,default_permissions",
        device.as_raw_fd()
    );
    mount(
        Some("hotspare"),
        mountpoint,
        Some("fuse.hotspare"),
        MsFlags::MS_NODEV | MsFlags::MS_NOATIME,
        Some(options.as_str()),
    )
}

fn serve(shared: Arc<Shared>, device: OwnedFd) -> std::io::Result<(Notifier, BackgroundSession)> {
    let mut config = Config::default();
    config.acl = SessionACL::All;
    config.n_threads = Some(SERVER_THREADS);
    config.clone_fd = true;
    let session = Session::from_fd(Server(shared), device, SessionACL::All, config)?;
    Ok((session.notifier(), session.spawn()?))
}
