//! libfabric itself: loaded once, and its providers.

use std::ffi::{CStr, CString, c_char, c_int, c_void};
use std::net::IpAddr;
use std::ptr::{NonNull, null, null_mut};
use std::sync::OnceLock;

use crate::ofi::abi::{
    API_VERSION, EpAttr, FI_CONTEXT, FI_CONTEXT2, FI_EP_RDM, FI_MR_ALLOCATED, FI_MR_ENDPOINT,
    FI_MR_LOCAL, FI_MR_PROV_KEY, FI_MR_VIRT_ADDR, FI_NUMERICHOST, FI_READ, FI_REMOTE_READ, FI_RMA,
    FI_SOCKADDR, FI_SOCKADDR_IN, FI_SOCKADDR_IN6, FI_SOURCE, FI_THREAD_DOMAIN, Fabric, FabricAttr,
    Info,
};
use crate::ofi::error::OfiError;

const FILE: &CStr = c"libfabric.so.1";
/// Providers whose hardware reads memory without a processor of the host that has it.
const HARDWARE: [&str; 7] = ["verbs", "cxi", "efa", "psm3", "psm2", "opx", "gni"];
/// Those that reach no other host, or do not arrive there: only by their name.
const BY_NAME_ONLY: [&str; 4] = ["shm", "sm2", "udp", "net"];

type GetInfo = unsafe extern "C" fn(
    u32,
    *const c_char,
    *const c_char,
    u64,
    *const Info,
    *mut *mut Info,
) -> c_int;

/// The functions that libfabric exports; all others are in tables of its objects.
pub struct Library {
    getinfo: GetInfo,
    dupinfo: unsafe extern "C" fn(*const Info) -> *mut Info,
    freeinfo: unsafe extern "C" fn(*mut Info),
    pub(crate) fabric:
        unsafe extern "C" fn(*mut FabricAttr, *mut *mut Fabric, *mut c_void) -> c_int,
    strerror: unsafe extern "C" fn(c_int) -> *const c_char,
}

/// A name under which libfabric reads remote memory here.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Provider {
    /// Such as `verbs;ofi_rxm`.
    pub name: String,
}

/// Whether a provider's hardware reads memory without a processor of the host that has it.
pub fn is_hardware(provider: &str) -> bool {
    HARDWARE.contains(&core_of(provider))
}

/// Whether this host has devices that read memory by themselves: asked without libfabric, which takes its time.
pub fn has_devices() -> bool {
    let has_entries = |class: &&str| {
        let entries = std::fs::read_dir(format!("/sys/class/{class}"));
        entries.is_ok_and(|mut entries| entries.next().is_some())
    };
    ["infiniband", "cxi"].iter().any(has_entries)
}

/// `tcp` of `tcp;ofi_rxm`.
fn core_of(provider: &str) -> &str {
    provider.split(';').next().unwrap_or(provider)
}

impl Provider {
    /// Whether `wanted` names it: wholly, or by what is below its layers.
    pub fn is_named(&self, wanted: &str) -> bool {
        self.name == wanted || core_of(&self.name) == wanted
    }

    /// Whether it may be taken where no provider is named.
    pub fn is_for_all(&self) -> bool {
        !BY_NAME_ONLY.contains(&core_of(&self.name))
    }
}

/// What libfabric answered: a list, freed as a whole.
pub(crate) struct InfoList {
    library: &'static Library,
    first: NonNull<Info>,
}

// SAFETY: plain memory that libfabric allocated for its caller; it belongs to no thread.
unsafe impl Send for InfoList {}

impl InfoList {
    /// Its first entry, which libfabric likes best.
    pub(crate) fn first(&self) -> &Info {
        // SAFETY: made by libfabric, freed when this is dropped, and unchanged until then.
        unsafe { self.first.as_ref() }
    }

    /// Pointer to the first entry, for calls of libfabric.
    pub(crate) fn as_ptr(&self) -> *mut Info {
        self.first.as_ptr()
    }

    fn entries(&self) -> impl Iterator<Item = &Info> {
        std::iter::successors(Some(self.first()), |info| {
            // SAFETY: null, or the next entry of the list, which lives as long.
            unsafe { info.next.as_ref() }
        })
    }
}

impl Drop for InfoList {
    fn drop(&mut self) {
        // SAFETY: a list of this library that is freed once.
        unsafe { (self.library.freeinfo)(self.first.as_ptr()) };
    }
}

/// Its provider's name.
pub(crate) fn provider_of(info: &Info) -> String {
    // SAFETY: null, or a structure that lives as long as `info`.
    let name = unsafe { info.fabric_attr.as_ref() }.map_or(null_mut(), |attr| attr.prov_name);
    text(name)
}

fn text(text: *const c_char) -> String {
    if text.is_null() {
        return String::new();
    }
    // SAFETY: libfabric's texts end with a zero.
    unsafe { CStr::from_ptr(text) }
        .to_string_lossy()
        .into_owned()
}

fn loader_error() -> OfiError {
    // SAFETY: it returns null or a text of this thread's.
    let why = unsafe { libc::dlerror() };
    OfiError::NoLibrary { why: text(why) }
}

impl Library {
    /// Loads it; once, for the whole process.
    pub fn load() -> Result<&'static Self, OfiError> {
        static LOADED: OnceLock<Result<Library, OfiError>> = OnceLock::new();
        let loaded = LOADED.get_or_init(|| {
            // SAFETY: libfabric's constructors set nothing of ours; it is the library that the user's loader finds, as
            // for each program that is linked with it. It is never unloaded, so what it starts stays valid.
            let handle = unsafe { libc::dlopen(FILE.as_ptr(), libc::RTLD_NOW | libc::RTLD_LOCAL) };
            let handle = NonNull::new(handle).ok_or_else(loader_error)?;
            // SAFETY: each name is that of a function of libfabric of the type of its member (rdma/fabric.h,
            // rdma/fi_errno.h), the same in every version of libfabric.so.1.
            unsafe {
                Ok(Self {
                    getinfo: std::mem::transmute::<*mut c_void, GetInfo>(symbol(
                        handle,
                        c"fi_getinfo",
                    )?),
                    dupinfo: std::mem::transmute::<
                        *mut c_void,
                        unsafe extern "C" fn(*const Info) -> *mut Info,
                    >(symbol(handle, c"fi_dupinfo")?),
                    freeinfo: std::mem::transmute::<*mut c_void, unsafe extern "C" fn(*mut Info)>(
                        symbol(handle, c"fi_freeinfo")?,
                    ),
                    fabric: std::mem::transmute::<
                        *mut c_void,
                        unsafe extern "C" fn(
                            *mut FabricAttr,
                            *mut *mut Fabric,
                            *mut c_void,
                        ) -> c_int,
                    >(symbol(handle, c"fi_fabric")?),
                    strerror: std::mem::transmute::<
                        *mut c_void,
                        unsafe extern "C" fn(c_int) -> *const c_char,
                    >(symbol(handle, c"fi_strerror")?),
                })
            }
        });
        loaded.as_ref().map_err(Clone::clone)
    }

    /// libfabric's words for an error, which its calls return negated.
    pub(crate) fn describe(&self, error: isize) -> String {
        let number = i32::try_from(error.unsigned_abs()).unwrap_or(libc::EIO);
        // SAFETY: it takes any number and returns a text that stays.
        text(unsafe { (self.strerror)(number) })
    }

    /// What reads remote memory here, in the order in which it is to be tried: hardware first.
    pub fn providers(&'static self) -> Vec<Provider> {
        let mut found: Vec<Provider> = Vec::new();
        if let Ok(list) = self.info(None, None) {
            for info in list.entries() {
                let name = provider_of(info);
                if found.iter().all(|provider| provider.name != name) {
                    found.push(Provider { name });
                }
            }
        }
        found.sort_by_key(|provider| {
            let core = core_of(&provider.name);
            let rank = HARDWARE.iter().position(|name| *name == core);
            (rank.unwrap_or(HARDWARE.len()), !provider.is_for_all())
        });
        found
    }

    /// What libfabric has for a provider, near an address of this host where the provider knows such ones.
    pub(crate) fn find(
        &'static self,
        provider: &str,
        near: Option<IpAddr>,
    ) -> Result<InfoList, OfiError> {
        let missing = |_| OfiError::NoProvider {
            wanted: provider.into(),
            found: self.names(),
        };
        let any = self.info(Some(provider), None).map_err(missing)?;
        let by_address = [FI_SOCKADDR, FI_SOCKADDR_IN, FI_SOCKADDR_IN6];
        if near.is_none() || !by_address.contains(&any.first().addr_format) {
            return Ok(any);
        }
        // A device may have none of the addresses that TCP has.
        Ok(self.info(Some(provider), near).unwrap_or(any))
    }

    fn names(&'static self) -> String {
        let names: Vec<_> = self
            .providers()
            .into_iter()
            .map(|found| found.name)
            .collect();
        if names.is_empty() {
            "none".into()
        } else {
            names.join(", ")
        }
    }

    fn info(
        &'static self,
        provider: Option<&str>,
        near: Option<IpAddr>,
    ) -> Result<InfoList, isize> {
        let hints = self.hints(provider)?;
        let node = near.map(|address| CString::new(address.to_string()).expect("digits"));
        let (node, flags) = match &node {
            Some(node) => (node.as_ptr(), FI_SOURCE | FI_NUMERICHOST),
            None => (null(), 0),
        };
        let mut found = null_mut();
        // SAFETY: the hints are libfabric's own, the node is null or a text with its end, and the answer is an entry to
        // be freed by `InfoList`.
        let code =
            unsafe { (self.getinfo)(API_VERSION, node, null(), flags, hints.as_ptr(), &mut found) };
        let first = NonNull::new(found).ok_or(code as isize)?;
        let list = InfoList {
            library: self,
            first,
        };
        match code {
            0 => Ok(list),
            code => Err(code as isize),
        }
    }

    /// What is wanted: reads of remote memory between endpoints without a connection of their own.
    fn hints(&'static self, provider: Option<&str>) -> Result<InfoList, isize> {
        let no_memory = -(libc::ENOMEM as isize);
        // SAFETY: without an entry to copy it makes an empty one, with all its parts.
        let first = NonNull::new(unsafe { (self.dupinfo)(null()) }).ok_or(no_memory)?;
        let list = InfoList {
            library: self,
            first,
        };
        // SAFETY: the entry was just made and only this function has it; its parts are allocated along with it, or
        // null.
        unsafe {
            let info = &mut *list.first.as_ptr();
            info.caps = FI_RMA | FI_READ | FI_REMOTE_READ;
            info.mode = FI_CONTEXT | FI_CONTEXT2;
            let endpoint: &mut EpAttr = info.ep_attr.as_mut().ok_or(no_memory)?;
            endpoint.kind = FI_EP_RDM;
            let domain = info.domain_attr.as_mut().ok_or(no_memory)?;
            domain.threading = FI_THREAD_DOMAIN;
            domain.mr_mode =
                FI_MR_LOCAL | FI_MR_VIRT_ADDR | FI_MR_ALLOCATED | FI_MR_PROV_KEY | FI_MR_ENDPOINT;
            let fabric = info.fabric_attr.as_mut().ok_or(no_memory)?;
            if let Some(provider) = provider {
                let name = CString::new(provider).map_err(|_| -(libc::EINVAL as isize))?;
                // libfabric frees the name with free(3).
                fabric.prov_name = libc::strdup(name.as_ptr());
            }
        }
        Ok(list)
    }
}

/// # Safety
/// `handle` is that of a loaded library.
unsafe fn symbol(handle: NonNull<c_void>, name: &CStr) -> Result<*mut c_void, OfiError> {
    // SAFETY: as promised; the name ends with a zero.
    let found = unsafe { libc::dlsym(handle.as_ptr(), name.as_ptr()) };
    if found.is_null() {
        return Err(loader_error());
    }
    Ok(found)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_provider_is_named_wholly_or_by_what_is_below_its_layers() {
        let provider = Provider {
            name: "verbs;ofi_rxm".into(),
        };
        assert!(provider.is_named("verbs") && provider.is_named("verbs;ofi_rxm"));
        assert!(!provider.is_named("ofi_rxm") && !provider.is_named("verb"));
        assert!(is_hardware("verbs;ofi_rxm") && is_hardware("cxi"));
        assert!(!is_hardware("tcp;ofi_rxm") && !is_hardware("shm") && !is_hardware(""));
    }
}
