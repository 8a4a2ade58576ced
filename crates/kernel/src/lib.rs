//! Typed handles on the Linux kernel: ptrace, userfaultfd, pagemap, TCP_REPAIR, namespaces.
//! The host side's only unsafe code.

pub mod accessed;
mod bpf;
mod btf;
pub mod descriptor;
pub mod epoll;
mod error;
pub mod file_handle;
pub mod identity;
pub mod ipc;
pub mod kept_file;
pub mod kill_point;
pub mod marks;
pub mod memory;
pub mod missing;
pub mod namespace;
pub mod netlink;
pub mod news;
pub mod opener;
pub mod packet_tap;
pub mod pagemap;
pub mod pidfd;
pub mod proc_maps;
pub mod ptrace;
pub mod realtime;
pub mod remote;
pub mod segment;
pub mod shared;
pub mod sock_diag;
pub mod socket;
pub mod sparse;
pub mod spawn;
pub mod tcp;
pub mod thread_info;
pub mod tun;
pub mod userfaultfd;
pub mod xattr;

pub use error::{KernelError, Result};
pub use file_handle::open_fuse_inode;
pub use namespace::Namespaces;
pub use ptrace::HostPid;
pub use xattr::{get_xattr, list_xattrs, remove_xattr, set_xattr};
