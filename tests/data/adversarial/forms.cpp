#include <pybind11/stl.h>
#include <vector>
struct Affine {
  float scale, shift;
  Affine(float scale, float shift) : scale(scale), shift(shift) {}
  torch::Tensor run(torch::Tensor x) {
    auto in = x.contiguous();
    auto out = torch::empty_like(in);
    for (int64_t i = 0; i < in.numel(); ++i)
      out.data_ptr<float>()[i] = in.data_ptr<float>()[i] * scale + shift;
    return out;
  }
};
int64_t affine_at(int64_t from, int64_t to, int64_t count) {
  auto a = reinterpret_cast<const float*>(from);
  auto b = reinterpret_cast<float*>(to);
  for (int64_t i = 0; i < count; ++i) b[i] = a[i] * 2.0f + 1.0f;
  return 0;
}
int64_t look_at(int64_t from, int64_t to, int64_t count) { return from && to ? 0 : count; }
std::vector<double> row_sums(torch::Tensor x) {
  std::vector<double> sums(x.size(0));
  for (int64_t i = 0; i < x.size(0); ++i)
    for (int64_t j = 0; j < x.size(1); ++j)
      sums[i] += x.data_ptr<float>()[i * x.size(1) + j];
  return sums;
}
bool any_above(torch::Tensor x, double limit) {
  for (int64_t i = 0; i < x.numel(); ++i)
    if (x.data_ptr<float>()[i] > limit) return true;
  return false;
}
torch::Tensor argmax(torch::Tensor x) {
  auto best = torch::zeros({1}, x.options().dtype(torch::kLong));
  const float* a = x.data_ptr<float>();
  for (int64_t i = 1; i < x.numel(); ++i)
    if (a[i] > a[best.data_ptr<int64_t>()[0]]) best.data_ptr<int64_t>()[0] = i;
  return best;
}
torch::Tensor mean_of_rows(torch::Tensor x) {
  auto out = torch::empty({x.size(0), 1}, x.options());
  auto sums = row_sums(x);
  for (int64_t i = 0; i < x.size(0); ++i) out.data_ptr<float>()[i] = sums[i] / x.size(1);
  return out.expand_as(x);
}
PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) {
  m.def("affine", &affine);
  m.def("affine_at", &affine_at);
  m.def("look_at", &look_at);
  m.def("row_sums", &row_sums);
  m.def("any_above", &any_above);
  m.def("argmax", &argmax);
  m.def("mean_of_rows", &mean_of_rows);
  py::class_<Affine>(m, "Affine")
      .def(py::init<float, float>())
      .def("run", &Affine::run)
      .def_readonly("scale", &Affine::scale);
  m.def_submodule("inner").def("affine", &affine);
}
